"""Tests of `tollkeeper.service`."""
