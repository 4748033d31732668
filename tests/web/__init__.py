"""Tests of `ratekeeper.web`."""
