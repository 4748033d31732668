"""Headers of which only three numbers change, prepared once.

An application with one limit sends the same five headers on every response, but for what remains
and until when. `answers.py` works them out for every kind of ruling; this asks it once, keeps what
stays the same, and prints the rest in less than half the time. A property test holds the two to the
same bytes.
"""

from __future__ import annotations

from typing import Final

from tollkeeper.clock import NS_PER_SECOND
from tollkeeper.edge.answers import RawHeader, Style, raw_headers_of
from tollkeeper.model import Decision
from tollkeeper.ruling import Ruling

_NAMES: Final = [
    b"x-ratelimit-limit",
    b"x-ratelimit-remaining",
    b"x-ratelimit-reset",
    b"ratelimit",
    b"ratelimit-policy",
]


class Prepared:
    """The headers of one limiter's allowed requests."""

    __slots__ = ("_limit", "_policy", "_reset", "_reset_s", "_start")

    def __init__(self, sample: list[RawHeader]) -> None:
        """`sample` is what a ruling of the limiter had."""
        self._limit, _, self._reset, state, self._policy = sample
        self._reset_s = int(self._reset[1])
        # "name";r=73;t=36, and whatever a name holds, the last ;r= is the one before the number.
        name, between, _ = state[1].rpartition(b";r=")
        self._start = name + between

    def headers(self, decision: Decision, now_ns: int) -> list[RawHeader]:
        """As `raw_headers_of` has them, for a decision that allows and is not degraded."""
        remaining = b"%d" % decision.remaining
        reset_after_ns = decision.reset_after_ns
        # -(a // -b) rounds up.
        reset_s = -((now_ns + reset_after_ns) // -NS_PER_SECOND)
        reset = self._reset
        if reset_s != self._reset_s:
            # The same for many requests in a row. Two threads that do this at once do no harm:
            # each uses what it has made itself.
            reset = self._reset = (b"x-ratelimit-reset", b"%d" % reset_s)
            self._reset_s = reset_s
        state = b"%b%b;t=%d" % (self._start, remaining, -(reset_after_ns // -NS_PER_SECOND))
        return [
            self._limit,
            (b"x-ratelimit-remaining", remaining),
            reset,
            (b"ratelimit", state),
            self._policy,
        ]


def prepared(ruling: Ruling, now_ns: int, style: Style) -> Prepared | None:
    """Headers prepared after a limiter's ruling; None where more than numbers would change."""
    applied = ruling.applied
    one = len(applied) == 1 and len(applied[0].limits) == 1 and ruling.kind == "limited"
    if not one or not ruling.decision.allowed or ruling.decision.degraded:
        return None
    sample = raw_headers_of(ruling, now_ns, style)
    return (
        Prepared(sample) if style.draft == 10 and [name for name, _ in sample] == _NAMES else None
    )
