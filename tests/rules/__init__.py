"""Tests of `tollkeeper.rules`."""
