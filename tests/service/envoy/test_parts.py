"""Parts of limits: what they send, and what they change in the store."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper.core.clock import ManualClock
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.core.model import Request
from ratekeeper.service.envoy import shares
from ratekeeper.service.envoy.buckets import NEVER_S, add_assignment
from ratekeeper.service.envoy.parts import Action, GrantPart, Part, RatePart
from ratekeeper.service.envoy.protocol.messages import BucketId, RateLimitQuotaResponse
from tests.service.envoy.streams import FakeCells, FakeLimiter, actions_of

RULES = (
    "{version: 1, rules: [{id: tenants, by: tenant, limits: 100/s, consistency: leased, "
    "envoy_quota: rate}]}"
)
GRANTS = RULES.replace("100/s", "1000/365d").replace("rate", "grants")
ACME = Request(tenant="acme")
BUCKET = BucketId(bucket={"tenant": "acme"}).SerializeToString()


class PartTest:
    """A store and a clock for parts."""

    def __init__(self, rules: str = RULES) -> None:
        self.clock = ManualClock(1_000)
        self.limiter = FakeLimiter(rules, self.clock)

    @property
    def cells(self) -> FakeCells:
        """The cells of the store."""
        return self.limiter.cells

    def part(self, node: str = "a") -> RatePart:
        """Return the part of one Envoy."""
        plan = self.limiter.compiled_rules.plan(ACME, 1)
        return RatePart(self.cells, plan.enforced[0], node, self.clock.now_ns)

    def grants(self, envoys: int = 1) -> GrantPart:
        """Return the part of one of so many Envoys that get grants."""
        checks = tuple(self.limiter.compiled_rules.plan(ACME, 1).enforced)
        limiter: Any = self.limiter
        return GrantPart(limiter, ACME, checks, lambda _: envoys, self.clock.now_ns)

    async def room(self) -> int:
        """Return the units that are left."""
        return (await self.limiter.peek(ACME, 0)).remaining

    def send(self, part: Part, action: Action) -> list[str]:
        """Send an action; return what Envoy reads."""
        response = RateLimitQuotaResponse()
        part.sending()
        add_assignment(response, BUCKET, action.strategies, action.ttl_s)
        part.sent(self.clock.now_ns())
        return [text for _, text in actions_of(response)]

    def entry(self) -> Any:
        """Return the only entry of the table."""
        (value,) = self.cells.values.values()
        (found,) = shares.decode(value).entries
        return found


async def test_a_share_is_new_then_renewed_and_new_again_when_it_has_expired() -> None:
    """Envoy starts an expired bucket full, so the share says that it is new."""
    test = PartTest()
    part = test.part()
    assert part.shown() == "nothing yet"
    part.note(1, 0, test.clock.now_ns())
    action = await part.decide()
    assert (action.kind, action.changes, part.until_ns) == ("rate", True, 0)
    assert test.send(part, action) == ["deny all", "100, 100/1s"]
    assert part.until_ns == test.clock.now_ns() + shares.TTL_S * 10**9
    assert part.shown() == "100/s of 100/s, burst 100"
    test.clock.advance(5)
    part.note(50, 0, test.clock.now_ns())
    action = await part.decide()
    assert (action.kind, action.changes) == ("renewal", False)
    assert test.send(part, action) == ["100, 100/1s"]
    test.clock.advance(20)
    assert test.send(part, await part.decide()) == ["deny all", "100, 100/1s"]


async def test_a_part_waits_while_requests_are_denied() -> None:
    """A second Envoy without room denies, and says so once."""
    test = PartTest()
    first, second = test.part(), test.part("b")
    test.send(first, await first.decide())
    for denied in (3, 0):
        second.note(0, denied, test.clock.now_ns())
        assert second.waits == (denied > 0)
    action = await second.decide()
    assert test.send(second, action) == ["deny all"]
    assert second.waits
    action = await second.decide()
    assert not action.changes


async def test_a_part_that_has_its_target_does_not_wait() -> None:
    """Although requests are denied: the limit is reached."""
    test = PartTest()
    part = test.part()
    part.note(1, 0, test.clock.now_ns())
    test.send(part, await part.decide())
    test.clock.advance(5)
    part.note(500, 900, test.clock.now_ns())
    test.send(part, await part.decide())
    assert not part.waits


async def test_the_end_of_a_part_marks_its_entry() -> None:
    """A part of a stream that ended can be taken over; one of an abandoned bucket cannot."""
    for abandoned, name in ((False, shares.name_of("a")), (True, b"")):
        test = PartTest()
        part = test.part()
        test.send(part, await part.decide())
        test.clock.advance(5)
        part.note(1, 0, test.clock.now_ns())
        await part.end(abandoned=abandoned)
        assert (test.entry().is_lost, test.entry().name) == (True, name)


# ── Grants ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_grant_is_charged_before_it_is_sent_and_sized_by_demand() -> None:
    """The first one, of an unknown demand, is a small part of the room."""
    test = PartTest(GRANTS)
    part = test.grants(envoys=2)
    assert part.shown() == "nothing yet"
    assert part.waits
    part.note(0, 1, test.clock.now_ns())
    action = await part.decide()
    assert action is not None
    assert (action.kind, action.changes) == ("grant", True)
    assert await test.room() == 1_000 - 62
    assert test.send(part, action) == ["deny all", f"62, 1/{NEVER_S}s"]
    assert part.shown() == "62 granted last"
    assert part.until_ns == test.clock.now_ns() + action.ttl_s * 10**9
    assert await part.decide() is None
    test.clock.advance(5)
    part.note(60, 0, test.clock.now_ns())
    action = await part.decide()
    assert action is not None
    assert test.send(part, action) == ["deny all", f"76, 1/{NEVER_S}s"]
    assert await test.room() == 1_000 - 62 - 76


async def test_units_that_no_grant_can_spend_any_more_are_refunded() -> None:
    """Two reports after the next grant was sent, the first one is settled."""
    test = PartTest(GRANTS)
    part = test.grants()
    for allowed in (0, 100, 0):
        part.note(allowed, 0, test.clock.now_ns())
        action = await part.decide()
        if action is not None:
            test.send(part, action)
        test.clock.advance(5)
    # 100 were spent; while the bucket is idle, little more is out.
    for _ in range(5):
        part.note(0, 0, test.clock.now_ns())
        part.may_abandon()
        action = await part.decide()
        if action is not None:
            test.send(part, action)
        test.clock.advance(5)
    assert 1_000 - 100 - 4 <= await test.room() <= 1_000 - 100


async def test_without_room_envoy_denies_and_the_part_asks_again() -> None:
    """DENY_ALL replaces what is left of the last grant when that expires."""
    test = PartTest(GRANTS)
    part = test.grants()
    await test.limiter.check(ACME, 1_000)
    part.note(0, 1, test.clock.now_ns())
    action = await part.decide()
    assert action is not None
    assert test.send(part, action) == ["deny all"]
    assert await part.decide() is None
    test.clock.advance(2)
    assert part.waits
    await test.limiter.settle_charges([(each.at(10), None) for each in part._checks], [], 0)
    action = await part.decide()
    assert action is not None
    assert test.send(part, action) == ["deny all", f"1, 1/{NEVER_S}s"]


async def test_a_store_that_fails_grants_nothing() -> None:
    """The answer of a failure policy is not a charge."""
    test = PartTest(GRANTS)
    part = test.grants()
    test.cells.fails = True
    with pytest.raises(StoreUnavailable):
        await part.decide()
    await part.end(abandoned=False)
    test.cells.fails = False
    assert await test.room() == 1_000


async def test_a_grant_that_was_not_sent_is_refunded() -> None:
    """Its Envoy never gets it."""
    test = PartTest(GRANTS)
    part = test.grants()
    part.note(1, 0, test.clock.now_ns())
    before = await test.room()
    action = await part.decide()
    assert action is not None
    assert await test.room() < before
    test.clock.advance(2)
    again = await part.decide()
    assert again is not None
    test.send(part, again)
    granted = part._ledger.current
    assert granted is not None
    assert await test.room() == before - granted.units


async def test_an_idle_bucket_gives_its_units_back_before_it_is_abandoned() -> None:
    """Otherwise a tenant with few requests would lose a part of its limit again and again."""
    test = PartTest(GRANTS)
    part = test.grants()
    room = await test.room()
    part.note(1, 0, test.clock.now_ns())
    reports = 0
    while True:
        action = await part.decide()
        if action is not None:
            test.send(part, action)
        test.clock.advance(5)
        part.note(0, 0, test.clock.now_ns())
        reports += 1
        if reports >= 3 and part.may_abandon():
            break
    await part.end(abandoned=True)
    assert reports <= 7
    assert await test.room() >= room - 2


async def test_a_bucket_that_is_used_again_gets_grants_as_before() -> None:
    """While it is idle, it has one unit for the first request."""
    test = PartTest(GRANTS)
    part = test.grants()
    part.note(1, 0, test.clock.now_ns())
    action = await part.decide()
    assert action is not None
    test.send(part, action)
    test.clock.advance(5)
    part.note(0, 0, test.clock.now_ns())
    assert not part.may_abandon()
    action = await part.decide()
    assert action is not None
    assert test.send(part, action)[1].startswith("1, ")
    test.clock.advance(5)
    part.note(1, 3, test.clock.now_ns())
    action = await part.decide()
    assert action is not None
    assert not test.send(part, action)[1].startswith("1, ")
