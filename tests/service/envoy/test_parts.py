"""Parts of limits: what they send, and what they change in the store."""

from __future__ import annotations

from typing import Any

from tests.service.envoy.streams import FakeCells, FakeLimiter, actions_of
from tollkeeper.core.clock import ManualClock
from tollkeeper.core.model import Request
from tollkeeper.service.envoy import shares
from tollkeeper.service.envoy.buckets import add_assignment
from tollkeeper.service.envoy.parts import Action, Part, RatePart
from tollkeeper.service.envoy.protocol.messages import BucketId, RateLimitQuotaResponse

RULES = (
    "{version: 1, rules: [{id: tenants, by: tenant, limits: 100/s, consistency: leased, "
    "envoy_quota: rate}]}"
)
BUCKET = BucketId(bucket={"tenant": "acme"}).SerializeToString()


class PartTest:
    """A store and a clock for parts."""

    def __init__(self) -> None:
        self.clock = ManualClock(1_000)
        self.limiter = FakeLimiter(RULES, self.clock)

    @property
    def cells(self) -> FakeCells:
        """The cells of the store."""
        assert self.limiter.cells is not None
        return self.limiter.cells

    def part(self, node: str = "a") -> RatePart:
        """Return the part of one Envoy."""
        plan = self.limiter.compiled_rules.plan(Request(tenant="acme"), 1)
        return RatePart(self.cells, plan.enforced[0], node, self.clock.now_ns)

    def send(self, part: Part, action: Action) -> list[str]:
        """Send an action; return what Envoy reads."""
        response = RateLimitQuotaResponse()
        part.sending()
        add_assignment(response, BUCKET, action.strategies)
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
    action = await second.decide()
    assert not action.changes


async def test_the_end_of_a_part_marks_its_entry() -> None:
    """A part of a stream that ended can be taken over; one of an abandoned bucket cannot."""
    for abandoned, name in ((False, shares.name_of("a")), (True, b"")):
        test = PartTest()
        part = test.part()
        test.send(part, await part.decide())
        await part.end(abandoned=abandoned)
        assert (test.entry().is_lost, test.entry().name) == (True, name)
