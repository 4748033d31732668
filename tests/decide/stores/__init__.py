"""Tests of `tollkeeper.decide.stores`."""
