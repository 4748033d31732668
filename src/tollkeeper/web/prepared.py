"""Headers of which only three numbers change, prepared once.

An application with one limit sends the same five headers on every response, but for what remains
and until when. `answers.py` works them out for every kind of ruling; this asks it once, keeps what
stays the same, and prints the rest in less than half the time. A property test holds the two to the
same bytes.
"""

from __future__ import annotations

from typing import Final

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.model import CheckResult, Decision
from tollkeeper.web.answers import RawHeader, Style, raw_headers_of

_ALMOST_A_SECOND_NS: Final = NS_PER_SECOND - 1
# Answers are kept where fewer units than this remain, about 500 bytes each. Larger numbers hardly
# come twice, and to keep what never comes again takes longer than to print it.
KNOWN_MAX: Final = 1_024

_NAMES: Final = [
    b"x-ratelimit-limit",
    b"x-ratelimit-remaining",
    b"x-ratelimit-reset",
    b"ratelimit",
    b"ratelimit-policy",
]


class Prepared:
    """The headers of one limiter's allowed requests."""

    __slots__ = ("_after", "_known", "_limit", "_policy", "_reset", "_start")

    def __init__(self, sample: list[RawHeader]) -> None:
        """`sample` is what a ruling of the limiter had."""
        self._limit, _, reset, state, self._policy = sample
        self._reset = int(reset[1]), reset
        self._after = -1, b""
        # By what remains: the two times, and the headers. Where many are asked for, many are alike.
        self._known: dict[int, tuple[int, int, list[RawHeader]]] = {}
        # "name";r=73;t=36, and whatever a name holds, the last ;r= is the one before the number.
        name, between, _ = state[1].rpartition(b";r=")
        self._start = name + between

    def headers(self, decision: Decision, now_ns: int) -> list[RawHeader]:
        """As `raw_headers_of` has them, for a decision that allows and is not degraded.

        The list is not the caller's: others get the same.
        """
        remaining = decision.remaining
        # What is less than a second more is a second more: rounded up.
        after_ns = decision.reset_after_ns + _ALMOST_A_SECOND_NS
        reset_s = (now_ns + after_ns) // NS_PER_SECOND
        after_s = after_ns // NS_PER_SECOND
        if remaining >= KNOWN_MAX:
            return self._printed(remaining, reset_s, after_s)
        known = self._known.get(remaining)
        if known is not None and known[0] == reset_s and known[1] == after_s:
            return known[2]
        headers = self._printed(remaining, reset_s, after_s)
        self._known[remaining] = reset_s, after_s, headers
        return headers

    def _printed(self, remaining: int, reset_s: int, after_s: int) -> list[RawHeader]:
        # The two times are the same for many requests in a row, and kept until they change. Two
        # threads that do so at once do no harm: each uses what it has looked at or made itself.
        reset, after = self._reset, self._after
        if reset_s != reset[0]:
            header = (b"x-ratelimit-reset", b"%d" % reset_s)
            reset = self._reset = (reset_s, header)
        if after_s != after[0]:
            after = self._after = (after_s, b";t=%d" % after_s)
        printed = b"%d" % remaining
        return [
            self._limit,
            (b"x-ratelimit-remaining", printed),
            reset[1],
            (b"ratelimit", self._start + printed + after[1]),
            self._policy,
        ]


def prepared(ruling: CheckResult, now_ns: int, style: Style) -> Prepared | None:
    """Headers prepared after a limiter's ruling; None where more than numbers would change."""
    applied = ruling.applied
    one = len(applied) == 1 and len(applied[0].limits) == 1 and ruling.kind == "limited"
    if not one or not ruling.decision.allowed or ruling.decision.degraded:
        return None
    sample = raw_headers_of(ruling, now_ns, style)
    return (
        Prepared(sample) if style.draft == 10 and [name for name, _ in sample] == _NAMES else None
    )
