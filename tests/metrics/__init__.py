"""Tests of `tollkeeper.metrics`."""
