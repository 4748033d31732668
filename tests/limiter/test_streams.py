"""Streams that reserve too little, beside clients that reserve well, on one limit."""

from __future__ import annotations

import random

import pytest

from ratekeeper import Limiter, LimitExceeded
from ratekeeper.limiter.reservations import Reservation
from ratekeeper.testing import ManualClock

STREAMS = 50
MINUTES = 10
STEPS_A_SECOND = 4
STEPS = MINUTES * 60 * STEPS_A_SECOND
RATE = 60_000  # tokens a minute
RESERVED = 40  # a tenth of what a stream uses in the mean
USED_MAX = 800
WELL = 400  # what a client that reserves well uses and reserves


class Stream:
    """A stream that writes some tokens at each step, until it has written all of them."""

    def __init__(self, limiter: Limiter, tokens: int) -> None:
        self.held = limiter.reserve("budget", RESERVED)
        self.reservation: Reservation = self.held.__enter__()
        self.left = tokens

    def step(self, chunk: int, *, stops: bool) -> int:
        """Write; return the tokens. `stops` is True for a server that ends when it has no room."""
        tokens = min(chunk, self.left)
        has_room = self.reservation.use(tokens)
        self.left = 0 if stops and not has_room else self.left - tokens
        return tokens


class Load:
    """Streams on one limit, as many as there may be at a time."""

    def __init__(self, limits: str, chunk: int) -> None:
        self.clock = ManualClock()
        self.limiter = Limiter(limits, clock=self.clock)
        self.chunk = chunk
        self.streams: list[Stream] = []
        self.used = self.denied = 0
        self._rng = random.Random(7)

    def step(self, *, stops: bool = False) -> None:
        """Let every stream write for a quarter of a second, and begin new ones."""
        while len(self.streams) < STREAMS:
            try:
                self.streams.append(Stream(self.limiter, self._rng.randint(1, USED_MAX)))
            except LimitExceeded:
                self.denied += 1
                break
        for stream in self.streams:
            self.used += stream.step(self.chunk, stops=stops)
        for stream in [each for each in self.streams if not each.left]:
            stream.held.__exit__(None, None, None)
            self.streams.remove(stream)
        self.clock.advance(1 / STEPS_A_SECOND)


@pytest.mark.parametrize("stops", [False, True])
def test_streams_that_reserve_a_tenth_are_bounded(stops: bool) -> None:
    """Ten minutes of 50 streams that want twice the limit: what they use too much is paid back.

    Used are at most the limit's bound, and what the streams owe that are in flight: each of them at
    most USED_MAX. If a server stops at a False of `use`, it is one chunk of each.
    """
    load = Load(f"{RATE}/minute", chunk=10)
    for _ in range(STEPS):
        load.step(stops=stops)
    bound = RATE * (MINUTES + 1)
    over, over_max = load.used - bound, STREAMS * (load.chunk if stops else USED_MAX)
    print(f"stops={stops}: {load.used:,} of {bound:,} units: {over:,} over, bound {over_max:,}")
    assert over <= over_max
    assert load.used >= RATE * MINUTES * 0.99  # nothing but the limit denies
    assert load.denied > 1_000


def test_clients_that_reserve_well_are_not_denied_beside_them() -> None:
    """As long as there is room for what all of them use: no top-up keeps it from others.

    The streams use 36,000 of 60,000 units a minute, and the client that reserves well 12,000. The
    bucket holds the units of six seconds.
    """
    load, wrong = Load(f"{RATE}/minute capacity {RATE // 10}", chunk=3), 0
    for step in range(STEPS):
        load.step()
        if step % (2 * STEPS_A_SECOND) == 0:
            try:
                with load.limiter.reserve("budget", WELL) as reservation:
                    reservation.use(WELL)
            except LimitExceeded:
                wrong += 1
    print(f"{wrong} of {STEPS // 8} clients that reserve well and {load.denied} streams are denied")
    assert (wrong, load.denied) == (0, 0)
