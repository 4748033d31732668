"""Tests of `tollkeeper.fleet.transport`."""
