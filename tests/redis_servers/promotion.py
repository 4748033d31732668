"""When a replica took over from its primary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promotion:
    """`address` is the new primary's; `seen_at_seconds` is when it first said so itself, by
    `time.monotonic()`, and is late by some milliseconds at most."""

    address: tuple[str, int]
    seen_at_seconds: float
