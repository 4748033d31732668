"""Tests of `tollkeeper.rules.matching`."""
