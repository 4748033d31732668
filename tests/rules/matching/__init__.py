"""Tests of `ratekeeper.rules.matching`."""
