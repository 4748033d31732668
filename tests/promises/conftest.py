"""The promises hold on every store of the conformance suite."""

from tests.conformance.stores import factory, open_store

__all__ = ["factory", "open_store"]
