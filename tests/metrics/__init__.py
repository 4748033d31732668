"""Tests of `ratekeeper.metrics`."""
