"""Tests of `tollkeeper.web`."""
