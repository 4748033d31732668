"""Tests of `ratekeeper.limiter`."""
