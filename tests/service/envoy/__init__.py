"""Tests of Envoy's rate limit service."""
