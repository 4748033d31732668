"""Tests of `ratekeeper.rules`."""
