"""Tests of `tollkeeper.core`."""
