"""The result of a promotion: the new primary and the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promotion:
    """A replica's promotion to primary.

    `address` is the new primary's. `seen_at_seconds` is when it first reported the role itself, by
    `time.monotonic()`; it is at most some milliseconds late.
    """

    address: tuple[str, int]
    seen_at_seconds: float
