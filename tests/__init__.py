"""Tests mirror src/; conformance/ runs on every store."""
