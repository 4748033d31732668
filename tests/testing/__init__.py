"""Tests of `ratekeeper.testing`."""
