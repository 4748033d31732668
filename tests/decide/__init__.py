"""Tests of `tollkeeper.decide`."""
