"""Tests of `tollkeeper.rules.document`."""
