"""Tests of `tollkeeper.limiter`."""
