"""Tests of the ways in and the answers out."""
