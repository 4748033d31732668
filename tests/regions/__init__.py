"""Tests of the regions."""
