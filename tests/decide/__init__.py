"""Tests of `ratekeeper.decide`."""
