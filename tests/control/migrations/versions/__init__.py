"""Tests of each revision."""
