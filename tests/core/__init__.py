"""Tests of `ratekeeper.core`."""
