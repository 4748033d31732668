"""The outcome of one limit is a plain tuple, in the order that the kernel and the scripts use."""

from __future__ import annotations

from ratekeeper.decide.algorithms.outcome import Outcome


def test_the_order_of_the_fields() -> None:
    """Engines build an Outcome by position, so the order of its fields is part of the interface."""
    assert Outcome._fields == (
        "allowed",
        "remaining",
        "retry_after_ns",
        "reset_after_ns",
        "delay_ns",
        "charged_ns",
    )
