"""From the bytes of a call to its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper import AsyncLimiter, Request
from ratekeeper.service.envoy.protocol.messages import RateLimitRequest, RateLimitResponse
from ratekeeper.service.envoy.service import (
    HOLD_SECONDS_MAX,
    REMEMBERED_BYTES_MAX,
    REMEMBERED_MAX,
    RateLimitService,
)
from ratekeeper.service.grpc.calls import CallError, Status
from ratekeeper.service.http.tokens import Tokens, create_token
from ratekeeper.testing import ManualClock
from tests.redis_servers.ports import HOST, free_port
from tests.service.envoy.client import codes, entries, headers

RULES = {
    "version": 1,
    "rules": [
        {"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["5/hour"]},
        {"id": "slow", "match": {"attributes": {"generic_key": "slow*"}}, "by": ["generic_key"],
         "limits": [{"limit": 1, "per": "10s", "algorithm": "leaky_bucket", "capacity": 4}]},
        {"id": "pairs", "match": {"attributes": {"a": "*"}}, "by": ["a", "b", "c"],
         "limits": ["5/hour"]},
    ],
    "deny": ["user:mallory"],
}  # fmt: skip
ANN = entries(("user", "ann"))
SLOW = entries(("generic_key", "slow lane"))


class Call:
    """A call: metadata, and a deadline."""

    def __init__(self, left_s: float | None = None, authorization: str | None = None) -> None:
        self._left_s = left_s
        self._metadata = {"user-agent": "test"}
        if authorization is not None:
            self._metadata["authorization"] = authorization

    def metadata(self, name: str) -> str | None:
        return self._metadata.get(name)

    def time_remaining(self) -> float | None:
        return self._left_s


class Asking:
    """A service, its limiter and its clock."""

    def __init__(self, limiter: AsyncLimiter, clock: ManualClock, tokens: Tokens | None) -> None:
        self.limiter = limiter
        self.clock = clock
        self.service = RateLimitService(limiter, tokens=tokens, clock=clock)

    async def __call__(
        self, *descriptors: dict[str, Any], call: Call | None = None, **fields: Any
    ) -> RateLimitResponse:
        asked: dict[str, Any] = {"domain": "shop", **fields}
        body = RateLimitRequest(descriptors=descriptors, **asked).SerializeToString()
        reply = await self.service.should_rate_limit(body, call or Call())
        return RateLimitResponse.FromString(reply)

    async def left(self, **fields: Any) -> int:
        return (await self.limiter.peek(Request(**fields))).remaining


@asynccontextmanager
async def asking(
    rules: Any = RULES, tokens: Tokens | None = None, **options: Any
) -> AsyncIterator[Asking]:
    clock = ManualClock(start=1_767_225_600)
    async with AsyncLimiter.from_rules(rules, clock=clock, **options) as limiter:
        yield Asking(limiter, clock, tokens)


async def test_a_call_gets_a_decision() -> None:
    """Five of six pass, and each reply has what remains."""
    async with asyncio.timeout(10), asking() as ask:
        found = [await ask(ANN) for _ in range(6)]
        assert [codes(each)[0] for each in found] == ["OK"] * 5 + ["OVER_LIMIT"]
        assert [each.statuses[0].limit_remaining for each in found] == [4, 3, 2, 1, 0, 0]
        assert headers(found[0])["x-ratelimit-reset"] == str(1_767_225_600 + 720)


async def test_without_a_rule_there_is_no_limit() -> None:
    """An unknown domain or descriptor is OK, with a status and no numbers."""
    async with asking() as ask:
        response = await ask(entries(("unheard", "of")), domain="elsewhere")
        assert codes(response) == ["OK", "OK"]
        assert headers(response) == {}


async def test_wildcards_match_attributes() -> None:
    """`generic_key: slow*` matches every such key, and each has its own counter."""
    async with asking() as ask:
        for lane in ("slow lane", "slower"):
            response = await ask(entries(("generic_key", lane)))
            assert response.statuses[0].current_limit.name == "slow"
        fast = await ask(entries(("generic_key", "fast")))
        assert not fast.statuses[0].HasField("current_limit")


async def test_hits_addend_of_the_request_and_of_a_descriptor() -> None:
    """The descriptor's has priority; 0 of the request means 1, 0 of a descriptor peeks."""
    async with asking() as ask:
        await ask(ANN, hits_addend=2)
        await ask(ANN, hits_addend=0)
        await ask({**ANN, "hits_addend": {"value": 0}}, hits_addend=2)
        assert await ask.left(user="ann") == 2
        await ask({**ANN, "hits_addend": {"value": 2}}, hits_addend=9)
        assert await ask.left(user="ann") == 0
        assert codes(await ask({**ANN, "hits_addend": {"value": 0}}))[0] == "OVER_LIMIT"
        await ask({**ANN, "hits_addend": {"value": 3}, "is_negative_hits": True})
        assert await ask.left(user="ann") == 3


async def test_a_cost_that_can_never_fit_is_over_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other descriptors report their state; nothing is charged, and it is logged."""
    async with asking() as ask:
        with caplog.at_level(logging.WARNING, "ratekeeper.envoy"):
            response = await ask(entries(("user", "bob")), {**ANN, "hits_addend": {"value": 6}})
        assert codes(response) == ["OVER_LIMIT", "OK", "OVER_LIMIT"]
        assert response.statuses[1].current_limit.requests_per_unit == 5
        assert b"COST_EXCEEDS_CAPACITY" in response.raw_body
        assert await ask.left(user="bob") == 5
        assert "can never fit" in caplog.text


async def test_clients_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """At most one line a second for costs that can never fit."""
    async with asking() as ask:
        with caplog.at_level(logging.WARNING, "ratekeeper.envoy"):
            for _ in range(20):
                await ask(ANN, hits_addend=6)
            assert len(caplog.records) == 1
            ask.clock.advance(1)
            await ask(ANN, hits_addend=6)
            assert len(caplog.records) == 2


async def test_long_values_are_counted() -> None:
    """Three long values make a key together; an error would let the client pass."""
    descriptor = entries(("a", "x" * 250), ("b", "y" * 250), ("c", "z" * 250))
    other = entries(("a", "x" * 250), ("b", "y" * 250), ("c", "z" * 249))
    async with asking() as ask:
        found = [await ask(descriptor) for _ in range(6)]
        assert [codes(each)[0] for each in found] == ["OK"] * 5 + ["OVER_LIMIT"]
        assert codes(await ask(other))[0] == "OK"


async def test_a_blocked_client_is_over_the_limit() -> None:
    """The body has the reason, and there is no Retry-After."""
    async with asking() as ask:
        response = await ask(entries(("user", "mallory")))
        assert codes(response) == ["OVER_LIMIT", "OVER_LIMIT"]
        assert b"BLOCKED" in response.raw_body
        assert "retry-after" not in headers(response)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff\xff", "not a RateLimitRequest"),
        (RateLimitRequest(domain="").SerializeToString(), "domain"),
        (RateLimitRequest(domain="shop").SerializeToString(), "descriptors"),
        (b"\n\x02\xff\xfe", "not a RateLimitRequest"),
    ],
)
async def test_an_invalid_message_is_an_invalid_argument(body: bytes, said: str) -> None:
    """The details say what is wrong."""
    async with asking() as ask:
        with pytest.raises(CallError) as error:
            await ask.service.should_rate_limit(body, Call())
        assert error.value.status == Status.INVALID_ARGUMENT
        assert said in error.value.message


@settings(max_examples=200)
@given(st.binary(max_size=200))
async def test_any_bytes_get_a_reply_or_invalid_argument(body: bytes) -> None:
    """No other error is raised."""
    async with asking() as ask:
        code = Status.OK
        try:
            await ask.service.should_rate_limit(body, Call())
        except CallError as error:
            code = error.status
        assert code in {Status.OK, Status.INVALID_ARGUMENT}


async def test_remembered_messages_are_bounded() -> None:
    """New messages fill no memory, long ones are not kept, and each is decided again."""
    async with asking() as ask:
        for number in range(REMEMBERED_MAX + 10):
            await ask(entries(("k", str(number))))
        await ask(entries(("k", "x" * REMEMBERED_BYTES_MAX)))
        remembered = ask.service._remembered
        assert 0 < len(remembered) <= REMEMBERED_MAX
        assert max(map(len, remembered)) <= REMEMBERED_BYTES_MAX
        found = [await ask(ANN) for _ in range(6)]
        assert [codes(each)[0] for each in found] == ["OK"] * 5 + ["OVER_LIMIT"]


async def test_with_raise_envoy_decides() -> None:
    """on_failure="raise" is UNAVAILABLE: then `failure_mode_deny` decides."""
    away = f"redis://{HOST}:{free_port()}"
    async with AsyncLimiter.from_rules(RULES, store=away, on_failure="raise") as limiter:
        body = RateLimitRequest(domain="shop", descriptors=[ANN]).SerializeToString()
        with pytest.raises(CallError) as error:
            await RateLimitService(limiter).should_rate_limit(body, Call())
        assert error.value.status == Status.UNAVAILABLE


async def test_a_reply_waits_for_the_delay() -> None:
    """The first comes at once, the second ten seconds later, by the clock."""
    async with asking() as ask:
        start_ns = ask.clock.now_ns()
        await ask(SLOW)
        assert ask.clock.now_ns() == start_ns
        assert codes(await ask(SLOW, call=Call(left_s=11)))[0] == "OK"
        assert ask.clock.now_ns() == start_ns + 10 * 10**9


@pytest.mark.parametrize("left_s", [0.02, 10.0])
async def test_a_delay_beyond_the_deadline_is_denied_and_refunded(left_s: float) -> None:
    """Envoy has given up by then; a later request finds no place taken in the queue."""
    async with asking() as ask:
        await ask(SLOW)
        for _ in range(3):
            response = await ask(ANN, SLOW, call=Call(left_s=left_s))
            assert codes(response) == ["OVER_LIMIT", "OK", "OVER_LIMIT"]
            assert headers(response)["retry-after"] == "10"
        assert await ask.left(user="ann") == 5
        ask.clock.advance(10)
        assert codes(await ask(SLOW, call=Call(left_s=0.02)))[0] == "OK"


async def test_without_a_deadline_the_delay_has_a_maximum() -> None:
    """The queue in this test is longer than the maximum."""
    assert HOLD_SECONDS_MAX == 30
    async with asking() as ask:
        found = []
        for _ in range(2):
            before_ns = ask.clock.now_ns()
            found.append(codes(await ask(SLOW, hits_addend=4))[0])
            assert ask.clock.now_ns() - before_ns <= HOLD_SECONDS_MAX * 10**9
        assert found == ["OK", "OVER_LIMIT"]


async def test_a_call_cancelled_during_its_delay_is_refunded() -> None:
    """Its place in the queue is free again."""

    class Endless(ManualClock):
        __slots__ = ("held",)

        async def sleep_async(self, seconds: float) -> None:
            self.held.set()  # type: ignore[has-type]  # set below
            await asyncio.Event().wait()

    async with asking() as ask:
        await ask(SLOW)
        clock = Endless(start=1_767_225_600)
        clock.held = asyncio.Event()  # type: ignore[misc]  # one test's own
        held = RateLimitService(ask.limiter, clock=clock)
        body = RateLimitRequest(domain="shop", descriptors=[SLOW]).SerializeToString()
        before = await ask.left(attributes={"generic_key": "slow lane"})
        task = asyncio.create_task(held.should_rate_limit(body, Call()))
        async with asyncio.timeout(10):
            await clock.held.wait()
            assert await ask.left(attributes={"generic_key": "slow lane"}) == before - 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await ask.left(attributes={"generic_key": "slow lane"}) == before


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[Tokens, dict[str, str]]:
    """Return a token file, and the header for each token."""
    path = tmp_path / "tokens.json"
    scopes = {"envoy": {}, "shop": {"domain": "shop"}, "ann": {"user": "ann"}}
    secrets = {name: create_token(path, name, "check", scope)
               for name, scope in scopes.items()}  # fmt: skip
    secrets["reader"] = create_token(path, "reader", "read")
    return Tokens.load(path), {name: f"Bearer {secret}" for name, secret in secrets.items()}


async def test_a_call_needs_a_valid_token(tokens: tuple[Tokens, dict[str, str]]) -> None:
    """No token, a wrong one, or one of another role is rejected with advice."""
    known, authorization = tokens
    table = [
        (None, Status.UNAUTHENTICATED),
        ("Bearer rk_wrong", Status.UNAUTHENTICATED),
        ("Basic abc", Status.UNAUTHENTICATED),
        (authorization["reader"], Status.PERMISSION_DENIED),
    ]
    async with asking(tokens=known) as ask:
        for sent, code in table:
            with pytest.raises(CallError) as error:
                await ask(ANN, call=Call(authorization=sent))
            assert error.value.status == code
            assert "ratekeeper token create" in error.value.message
        assert codes(await ask(ANN, call=Call(authorization=authorization["envoy"])))[0] == "OK"
        assert await ask.left(user="ann") == 4


@pytest.mark.parametrize("body", [b"\xff\xff", b"", b"x" * 100_000])
async def test_without_a_token_the_message_is_not_read(
    body: bytes, tokens: tuple[Tokens, dict[str, str]]
) -> None:
    """The reply does not even show whether it is valid."""
    async with AsyncLimiter.from_rules(RULES) as limiter:
        service = RateLimitService(limiter, tokens=tokens[0])
        with pytest.raises(CallError) as error:
            await service.should_rate_limit(body, Call())
        assert error.value.status == Status.UNAUTHENTICATED


async def test_a_token_spends_only_in_its_scope(tokens: tuple[Tokens, dict[str, str]]) -> None:
    """Another subject's quota cannot be spent; missing fields are filled in."""
    known, authorization = tokens
    bob = entries(("user", "bob"))
    async with asking(tokens=known) as ask:
        for name, descriptor, domain in (("ann", bob, "shop"), ("shop", ANN, "elsewhere")):
            with pytest.raises(CallError) as error:
                await ask(descriptor, domain=domain, call=Call(authorization=authorization[name]))
            assert error.value.status == Status.PERMISSION_DENIED
        with pytest.raises(CallError):
            await ask(ANN, bob, call=Call(authorization=authorization["ann"]))
        assert (await ask.left(user="bob"), await ask.left(user="ann")) == (5, 5)
        await ask(entries(("k", "v")), call=Call(authorization=authorization["ann"]))
        assert await ask.left(user="ann") == 4


async def test_a_token_returns_units_only_in_its_scope(
    tokens: tuple[Tokens, dict[str, str]],
) -> None:
    """Under a rule that counts ann in all domains, a token of one domain returns nothing."""
    known, authorization = tokens
    back = {**ANN, "hits_addend": {"value": 1}, "is_negative_hits": True}
    async with asking(tokens=known) as ask:
        await ask(ANN, hits_addend=5, call=Call(authorization=authorization["envoy"]))
        for name, left in (("shop", 0), ("ann", 1), ("envoy", 2)):
            response = await ask(back, call=Call(authorization=authorization[name]))
            assert codes(response)[0] == "OK"
            assert await ask.left(user="ann") == left


async def test_without_a_token_file_no_token_is_needed(tmp_path: Path) -> None:
    """Until the first token is made, every client may call."""
    async with asking(tokens=Tokens.load(tmp_path / "none.json")) as ask:
        assert codes(await ask(ANN))[0] == "OK"
