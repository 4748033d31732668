"""Tests of what is recorded."""
