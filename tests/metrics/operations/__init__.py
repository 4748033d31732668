"""Tests of `ratekeeper.metrics.operations`."""
