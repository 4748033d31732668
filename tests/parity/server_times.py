"""Read the server's time of each decision."""

from __future__ import annotations

from ratekeeper.core.model import Decision
from ratekeeper.decide.store import LocalCounter
from ratekeeper.decide.stores.redis.codec import NS_PER_US, ReplyDecoder
from ratekeeper.decide.stores.redis.counters import RedisCounter
from tests.answering import AnsweringCounter


class TimedDecoder:
    """A decoder that notes the server's time in each reply."""

    def __init__(self, decoder: ReplyDecoder) -> None:
        self._decoder = decoder
        self.limits = decoder.limits
        self.now_ns = 0

    def check(self, reply: list[int], cost: int, early_ns: int = 0) -> Decision:
        self._note(reply)
        return self._decoder.check(reply, cost, early_ns)

    def peek(self, reply: list[int], cost: int, early_ns: int = 0) -> Decision:
        self._note(reply)
        return self._decoder.peek(reply, cost, early_ns)

    def __getattr__(self, name: str) -> object:
        return getattr(self._decoder, name)

    def _note(self, reply: list[int]) -> None:
        self.now_ns = (reply[0] if reply[0] >= 0 else ~reply[0]) * NS_PER_US


def timed(counter: LocalCounter) -> TimedDecoder:
    """Return the times of a counter's replies from now on."""
    assert isinstance(counter, AnsweringCounter)
    inner = counter.counter
    assert isinstance(inner, RedisCounter)
    times = TimedDecoder(inner.scripts.decoder)
    inner.scripts.decoder = times
    return times
