"""Tests of `ratekeeper.rules.document`."""
