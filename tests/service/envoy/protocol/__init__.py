"""Tests of the messages of Envoy's rate limit service."""
