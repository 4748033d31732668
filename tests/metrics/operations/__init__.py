"""Tests of `tollkeeper.metrics.operations`."""
