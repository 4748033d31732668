"""Tests of the revisions."""
