"""Tests of `ratekeeper.service.process`."""
