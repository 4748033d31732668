"""Tests of `ratekeeper.decide.stores`."""
