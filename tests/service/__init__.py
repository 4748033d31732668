"""Tests of `ratekeeper.service`."""
