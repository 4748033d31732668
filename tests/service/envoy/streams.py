"""An Envoy's side of a quota stream, without Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ratekeeper.core.clock import ManualClock
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.core.model import Decision, Request, decision_with
from ratekeeper.decide.stores.memory import MemoryCounter, PythonMemoryStore
from ratekeeper.limiter.charges import RuleCharge
from ratekeeper.rules.compiled import CompiledRules, RuleCheck
from ratekeeper.rules.document.reading import read
from ratekeeper.service.envoy.protocol.messages import (
    RateLimitQuotaResponse,
    RateLimitQuotaUsageReports,
    RateLimitStrategy,
)

DEADLINE_S = 10.0
Id = Mapping[str, str]


class FakeCall:
    """A stream between a test and a method: the test reports, and reads what was sent."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = {name.replace("_", "-"): value for name, value in metadata.items()}
        self._received: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = asyncio.Event()
        """Unset, the client does not read."""
        self.reads.set()

    def metadata(self, name: str) -> str | None:
        return self._metadata.get(name)

    def time_remaining(self) -> float | None:
        return None

    async def receive(self) -> bytes | None:
        return await self._received.get()

    async def send(self, message: bytes) -> None:
        await self.reads.wait()
        self._sent.put_nowait(message)

    def put(self, body: bytes | None) -> None:
        """Send a message as the client; None ends the stream."""
        self._received.put_nowait(body)

    def report(self, *usages: tuple[Id, int, int], domain: str = "shop") -> None:
        """Send a report of buckets: id, allowed and denied requests."""
        self.put(report_of(*usages, domain=domain).SerializeToString())

    async def answer(self) -> list[tuple[dict[str, str], str]]:
        """Return the actions of the next response: each bucket and what it gets, as text."""
        body = await asyncio.wait_for(self._sent.get(), DEADLINE_S)
        return actions_of(RateLimitQuotaResponse.FromString(body))

    @property
    def unread(self) -> int:
        """How many responses wait."""
        return self._sent.qsize()


def report_of(*usages: tuple[Id, int, int], domain: str = "shop") -> RateLimitQuotaUsageReports:
    """Return a report of buckets: id, allowed and denied requests."""
    return RateLimitQuotaUsageReports(
        domain=domain,
        bucket_quota_usages=[
            {
                "bucket_id": {"bucket": dict(bucket)},
                "num_requests_allowed": allowed,
                "num_requests_denied": denied,
            }
            for bucket, allowed, denied in usages
        ],
    )


def actions_of(response: RateLimitQuotaResponse) -> list[tuple[dict[str, str], str]]:
    """Return each action: the bucket, and what it gets in a few words."""
    return [(dict(each.bucket_id.bucket), _text(each)) for each in response.bucket_action]


def _text(action: Any) -> str:
    if action.WhichOneof("bucket_action") == "abandon_action":
        return "abandon"
    assigned = action.quota_assignment_action
    lasts = assigned.assignment_time_to_live
    assert lasts.seconds > 0
    assert not lasts.nanos
    strategy = assigned.rate_limit_strategy
    if strategy.WhichOneof("strategy") == "blanket_rule":
        allow = strategy.blanket_rule == RateLimitStrategy.ALLOW_ALL
        return "allow all" if allow else "deny all"
    tokens = strategy.token_bucket
    assert tokens.HasField("tokens_per_fill")
    assert tokens.fill_interval.seconds > 0
    assert not tokens.fill_interval.nanos
    return f"{tokens.max_tokens}, {tokens.tokens_per_fill.value}/{tokens.fill_interval.seconds}s"


class FakeCells:
    """Cells in memory, by a test's clock. `fails` makes every call fail."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.values: dict[str, bytes] = {}
        self.fails = False

    async def read(self, name: str) -> tuple[bytes | None, int]:
        if self.fails:
            raise StoreUnavailable("down")
        return self.values.get(name), self._clock.now_ns()

    async def write(self, name: str, expected: bytes | None, value: bytes, lasts_ns: int) -> bool:
        assert lasts_ns > 0
        if self.fails:
            raise StoreUnavailable("down")
        if self.values.get(name) != expected:
            return False
        self.values[name] = value
        return True


class FakeLimiter:
    """As much of a limiter with rules as quotas need, with counts in memory. It cannot lease."""

    def __init__(self, rules: str, clock: ManualClock) -> None:
        self._memory = PythonMemoryStore(clock)
        self._clock = clock
        self.cells = FakeCells(clock)
        self.is_local = False
        self.store = self
        self.use(rules)

    def use(self, rules: str) -> None:
        """Put other rules in force."""
        self.compiled_rules = CompiledRules(
            read(rules),
            lambda limits, rule, *_: self._memory.counter(limits, rule),
            self._clock.now_ns,
        )

    async def peek(self, request: Request, cost: int) -> Decision:
        """Peek at all rules; return the tightest."""
        checks = self.compiled_rules.plan(request, cost).enforced
        found = [self._memory_counter(each).peek(each.subject, 0) for each in checks]
        return self._answer(min(found, key=lambda each: each.remaining))

    async def check(self, request: Request, cost: int) -> Decision:
        """Charge a request with one rule."""
        (check,) = self.compiled_rules.plan(request, cost).enforced
        return self._answer(self._memory_counter(check).check(check.subject, check.units))

    async def settle_charges(self, charged: Sequence[RuleCharge], _: object, __: int) -> None:
        """Return the units of each charge."""
        for check, charged_ns in charged:
            self._memory_counter(check).refund(check.subject, check.units, charged_ns)

    def _memory_counter(self, check: RuleCheck) -> MemoryCounter:
        assert isinstance(check.counter, MemoryCounter)
        return check.counter

    def _answer(self, decision: Decision) -> Decision:
        """Return it, or what a failure policy would answer."""
        return decision_with(decision, degraded=True) if self.cells.fails else decision
