"""Tests of `tollkeeper.testing`."""
