"""Tests of `tollkeeper.service.process`."""
