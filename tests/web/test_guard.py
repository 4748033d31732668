"""Guards: the same promises for threads and asyncio, whatever the framework."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tollkeeper import (
    AsyncLimiter,
    ConfigError,
    Limit,
    Limiter,
    LocalFallback,
    Request,
    StoreUnavailable,
)
from tollkeeper.testing import ManualClock
from tollkeeper.web.answers import Style
from tollkeeper.web.calls import WsgiCall
from tollkeeper.web.charges import Charge
from tollkeeper.web.guard import AsyncGuard, Guard, Options, Refused, Terms

RULES = """
version: 1
rules:
  - id: orders
    match: {endpoint: "/orders/{id}"}
    by: [api_key]
    limits: ["2/minute"]
allow: ["sk_internal_*"]
"""


def _call(
    path: str = "/", *, peer: str = "192.0.2.1", route: str | None = None, **headers: str
) -> WsgiCall:
    environ = {"PATH_INFO": path, "REMOTE_ADDR": peer, "REQUEST_METHOD": "GET"}
    for name, value in headers.items():
        environ[f"HTTP_{name.upper()}"] = value
    return WsgiCall(environ, route=route)


class Waited:
    """An AsyncGuard with the verbs of a Guard: each is run to its end."""

    def __init__(self, terms: Terms, runner: asyncio.Runner) -> None:
        self._run = runner.run
        self.guard = AsyncGuard(terms)
        self.clock = self.guard.clock

    def enter(self, call: Any) -> Charge:
        return self._run(self.guard.enter(call))

    def leave(self, charge: Charge, status: int | None = None) -> None:
        self._run(self.guard.leave(charge, status))

    def response(self, call: Any, ruling: Any) -> Any:
        return self._run(self.guard.response(call, ruling))

    def beside(self, terms: Terms, name: str) -> Waited:
        other = object.__new__(Waited)
        other._run, other.guard = self._run, self.guard.beside(terms, name)
        return other

    def close(self) -> None:
        self._run(self.guard.close())


Make = Callable[..., Any]


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> type[Limiter | AsyncLimiter]:
    """The limiter that a guard takes."""
    found: type[Limiter | AsyncLimiter] = request.param
    return found


@pytest.fixture
def make(kind: type[Limiter | AsyncLimiter]) -> Iterator[Make]:
    """A guard of either kind, made of options, on a clock that a test moves."""
    made: list[Any] = []
    with asyncio.Runner() as runner:

        def made_of(**options: Any) -> Any:
            if "limiter" not in options:
                options.setdefault("clock", ManualClock(1_000))
            terms = Terms(**options)
            made.append(Guard(terms) if kind is Limiter else Waited(terms, runner))
            return made[-1]

        yield made_of
        for guard in made:
            guard.close()


# ── Who is counted ─────────────────────────────────────────────────────────────────────────────


def test_by_default_the_address_is_counted(make: Make) -> None:
    """Two addresses have a quota each, and one has one."""
    guard = make(limits="2/minute")
    found = [guard.enter(_call(peer=peer)).decision for peer in ("192.0.2.1",) * 3 + ("192.0.2.2",)]
    assert [decision.allowed for decision in found] == [True, True, False, True]


def test_the_first_source_that_finds_something_is_the_key(make: Make) -> None:
    """With a key in the header that counts, and the address for those without."""
    guard = make(limits="1/minute", key=["header:X-API-Key", "address"])
    assert guard.enter(_call(x_api_key="a")).decision.allowed
    assert not guard.enter(_call(peer="192.0.2.9", x_api_key="a")).decision.allowed
    assert guard.enter(_call(x_api_key="b")).decision.allowed
    assert guard.enter(_call()).decision.allowed
    assert not guard.enter(_call()).decision.allowed


@pytest.mark.parametrize("found", ["user:42", ("tenant:1", "user:42")])
def test_a_function_may_say_the_key(make: Make, found: Any) -> None:
    """What it returns is the key, and None is for the address."""
    guard = make(limits="1/minute", key=lambda call: found if call.header("user") else None)
    assert guard.enter(_call(user="x")).key == found
    assert guard.enter(_call()).decision.allowed
    assert not guard.enter(_call(user="x", peer="192.0.2.5")).decision.allowed


def test_routes_are_counted_by_themselves_if_asked_for(make: Make) -> None:
    """`per_route` counts by template; other numbers in the path are the same endpoint."""
    guard = make(limits="1/minute", per_route=True)
    assert guard.enter(_call("/users/1", route="/users/{id}")).decision.allowed
    assert not guard.enter(_call("/users/2", route="/users/{id}")).decision.allowed
    assert guard.enter(_call("/orders")).decision.allowed
    assert not guard.enter(_call("//orders/")).decision.allowed


def test_a_key_function_and_routes_go_together(make: Make) -> None:
    """A route is one more part of whatever key there is."""
    guard = make(limits="1/minute", per_route=True, key=lambda call: ("a", "b"))
    assert guard.enter(_call("/x")).key == ("a", "b", "/x")


@pytest.mark.parametrize("path", ["/" + "x" * 9_000, "/é\x1f\0", "/" + "%ff" * 400])
def test_no_path_is_too_long_to_be_counted(make: Make, path: str) -> None:
    """A long or strange path is an endpoint like any other, and no error."""
    guard = make(limits="1/minute", per_route=True)
    assert guard.enter(_call(path)).decision.allowed
    assert not guard.enter(_call(path)).decision.allowed
    assert guard.enter(_call(path + "y")).decision.allowed


def test_rules_are_asked_about_the_request_that_identity_makes(make: Make) -> None:
    """The rules' own `by` and lists decide; what no rule is for passes."""
    guard = make(rules=RULES, identify={"api_key": "header:X-API-Key"})
    orders = _call("/orders/1", route="/orders/{id}", x_api_key="sk_1")
    kinds = [guard.enter(orders).ruling for _ in range(3)]
    assert [ruling.decision.allowed for ruling in kinds] == [True, True, False]
    assert guard.enter(_call("/free", x_api_key="sk_1")).ruling.kind == "unlimited"
    internal = _call("/orders/1", route="/orders/{id}", x_api_key="sk_internal_7")
    assert guard.enter(internal).ruling.kind == "exempt"


def test_a_key_function_may_make_the_request_for_rules(make: Make) -> None:
    """Then its request is asked about, and None leaves it to identity."""
    asked = Request(api_key="sk_2", endpoint="/orders/9")
    guard = make(rules=RULES, key=lambda call: asked if call.header("mine") else None)
    assert guard.enter(_call(mine="1")).key is asked
    assert guard.enter(_call("/orders/1")).ruling.kind == "limited"


def test_a_limiter_of_ones_own_is_used_and_not_closed(
    make: Make, kind: type[Limiter | AsyncLimiter], tmp_path: Path
) -> None:
    """Its limits count, and it is as open after the guard as before."""
    clock = ManualClock()
    limiter = kind("1/minute", store=f"shared://{tmp_path}/x", clock=clock)
    guard = make(limiter=limiter)
    assert guard.clock is clock
    assert guard.enter(_call()).decision.allowed
    guard.close()
    assert not guard.enter(_call()).decision.allowed
    limiter.store.close()


def test_a_limiter_from_rules_is_asked_about_requests(
    make: Make, kind: type[Limiter | AsyncLimiter]
) -> None:
    """A limiter that has rules takes what identity makes, wherever it was made."""
    limiter = kind.from_rules(RULES, clock=ManualClock())
    guard = make(limiter=limiter, identify={"api_key": "header:X-API-Key"})
    assert guard.enter(_call("/orders/1", x_api_key="sk_1")).ruling.applied[0].rule == "orders"


# ── Costs and outcomes ─────────────────────────────────────────────────────────────────────────


def test_a_function_may_say_the_cost(make: Make) -> None:
    """Units are spent as it says, each request its own."""
    guard = make(limits="10/minute", cost=lambda call: int(call.header("cost") or 1))
    assert guard.enter(_call(cost="7")).decision.remaining == 3
    assert guard.enter(_call()).decision.remaining == 2


def test_what_is_skipped_is_not_counted(make: Make) -> None:
    """A call that `skip` is true for passes, and has a charge that may be settled in vain."""
    guard = make(limits="1/minute", skip=lambda call: call.path == "/healthz")
    for _ in range(3):
        charge = guard.enter(_call("/healthz"))
        assert charge.ruling.kind == "unlimited"
        charge.settle(5)
        guard.leave(charge, 200)
    assert guard.enter(_call()).decision.allowed


def test_a_settled_cost_is_what_is_spent(make: Make) -> None:
    """100 were reserved and 37 used: 37 are gone."""
    guard = make(limits="1000/minute", cost=100)
    charge = guard.enter(_call())
    charge.settle(37)
    guard.leave(charge, 200)
    guard.leave(charge, 200)
    assert guard.enter(_call()).decision.remaining == 1000 - 37 - 100


@pytest.mark.parametrize(("status", "counted"), [(401, True), (403, True), (200, False)])
def test_only_outcomes_that_count_are_kept(make: Make, status: int, counted: bool) -> None:
    """A login that succeeds is given back; one that fails is spent."""
    guard = make(limits="1/minute", count=lambda status: status in {401, 403})
    charge = guard.enter(_call())
    # On the way in it is charged, so a second guess meanwhile is not let in.
    assert not guard.enter(_call()).decision.allowed
    guard.leave(charge, status)
    assert guard.enter(_call()).decision.allowed is not counted


def test_without_an_outcome_a_request_counts(make: Make) -> None:
    """Who hangs up before the answer has guessed all the same."""
    guard = make(limits="1/minute", count=lambda status: status == 401)
    guard.leave(guard.enter(_call()))
    assert not guard.enter(_call()).decision.allowed


def test_a_leaky_bucket_holds_before_the_application_runs(make: Make) -> None:
    """Each is served a second after the one before, by the limiter's clock."""
    guard = make(limits=Limit(1, per=1, algorithm="leaky_bucket", capacity=3))
    times = []
    for _ in range(3):
        assert guard.enter(_call()).decision.allowed
        times.append(guard.clock.now_ns() // 10**9)
    assert times == [1000, 1001, 1002]


# ── What goes wrong ────────────────────────────────────────────────────────────────────────────


def test_a_cost_that_can_never_fit_is_a_422(make: Make) -> None:
    """No wait would help, and the answer says so."""
    with pytest.raises(Refused) as refused:
        make(limits="10/minute", cost=lambda call: 11).enter(_call())
    assert refused.value.answer.status == 422


@pytest.mark.parametrize("key", ["", "a\x1fb", ("a",) * 17, 42, "x" * 600])
def test_a_key_that_is_none_is_a_400(make: Make, key: Any) -> None:
    """The client is told what is wrong with it; nothing breaks."""
    with pytest.raises(Refused) as refused:
        make(limits="10/minute", key=lambda call: key).enter(_call())
    assert refused.value.answer.status == 400


@pytest.mark.parametrize("cost", [-1, "3", 1.5])
def test_a_cost_that_is_none_is_a_400(make: Make, cost: Any) -> None:
    """A cost that was read from a request may be anything."""
    with pytest.raises(Refused) as refused:
        make(limits="10/minute", cost=lambda call: cost).enter(_call())
    assert refused.value.answer.status == 400


@pytest.mark.parametrize("hook", ["key", "cost", "skip"])
@pytest.mark.parametrize("error", [ConfigError, ZeroDivisionError])
def test_a_hook_that_raises_is_the_applications_error(
    make: Make, hook: str, error: type[Exception]
) -> None:
    """It goes to the application as it is, even one that we raise ourselves."""

    def raising(call: object) -> None:
        raise error("mine")

    with pytest.raises(error, match="mine"):
        make(limits="10/minute", **{hook: raising}).enter(_call())


class Failing:
    """A limiter in a guard's place whose store cannot settle."""

    def settle(self, *asked: Any) -> Any:
        raise StoreUnavailable("the store is away")


def test_a_store_that_fails_while_settling_is_logged_and_no_more(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has its response; what was charged on the way in stays charged."""
    guard = make(limits="10/minute", key=lambda call: "secret-key")
    charge = guard.enter(_call())
    getattr(guard, "guard", guard)._limiter = Failing()
    charge.refund()
    with caplog.at_level(logging.WARNING, "tollkeeper.web"):
        guard.leave(charge, 200)
    assert "the store is away" in caplog.text
    assert "secret-key" not in caplog.text
    getattr(guard, "guard", guard)._limiter = None


def test_a_handler_for_denials_answers_in_its_own_way(make: Make) -> None:
    """`on_limit` is asked with the call and the ruling; without one there is no answer of ours."""
    guard = make(limits="1/minute", on_limit=lambda call, ruling: (call.path, ruling.kind))
    ruling = guard.enter(_call("/x")).ruling
    assert guard.response(_call("/x"), ruling) == ("/x", "limited")
    assert make(limits="1/minute").response(_call("/x"), ruling) is None


# ── Several guards on one store ────────────────────────────────────────────────────────────────


def test_guards_beside_one_share_its_store_and_ways_and_no_count(make: Make) -> None:
    """A route's limits count by themselves, whom the application counts, on one store."""
    guard = make(limits="3/minute", key="header:user", skip=lambda call: call.path == "/free")
    terms = Terms(limits="1/minute")
    route, other = guard.beside(terms, "GET /a"), guard.beside(terms, "GET /b")
    assert route.enter(_call(user="1")).decision.allowed
    assert not route.enter(_call(user="1", peer="192.0.2.7")).decision.allowed
    assert other.enter(_call(user="1")).decision.allowed
    assert guard.enter(_call(user="1")).decision.remaining == 2
    assert route.enter(_call("/free", user="1")).ruling.kind == "unlimited"
    assert route.enter(_call(user="2")).ruling.applied[0].rule == "GET /a"


def test_the_same_terms_and_name_are_one_guard() -> None:
    """Asked for on every request, it is made once."""
    guard = Guard(Terms(store="memory://"))
    terms = Terms(limits="1/minute")
    assert guard.beside(terms, "a") is guard.beside(terms, "a")
    assert guard.beside(terms, "a") is not guard.beside(terms, "b")
    assert guard.beside(Terms(limits="1/minute"), "a") is not guard.beside(terms, "a")
    guard.close()


def test_a_guard_beside_one_with_rules_counts_by_address(make: Make) -> None:
    """A key function that makes requests for rules is not asked for a route's limits."""
    guard = make(rules=RULES, key=lambda call: Request(api_key="sk_1"))
    route = guard.beside(Terms(limits="1/minute"), "r")
    assert route.enter(_call()).decision.allowed
    assert not route.enter(_call()).decision.allowed


def test_what_was_closed_opens_again_when_it_is_used(make: Make) -> None:
    """An application that is started twice, as tests do, has its limits both times."""
    guard = make(limits="1/minute")
    terms = Terms(limits="1/minute")
    for _ in range(2):
        assert guard.enter(_call()).decision.allowed
        assert not guard.enter(_call()).decision.allowed
        assert guard.beside(terms, "r").enter(_call()).decision.allowed
        guard.close()


def test_without_limits_of_its_own_a_guard_lets_pass(make: Make) -> None:
    """It is there for the routes that have theirs."""
    assert make().enter(_call()).ruling.kind == "unlimited"


# ── Asyncio alone ──────────────────────────────────────────────────────────────────────────────


async def test_every_hook_may_be_async() -> None:
    """Each is awaited, in either form."""

    async def key(call: Any) -> str:
        return str(call.header("user"))

    async def cost(call: Any) -> int:
        return 2

    async def skip(call: Any) -> bool:
        return call.path == "/free"

    async def on_limit(call: Any, ruling: Any) -> str:
        return "mine"

    async def count(status: int) -> bool:
        return status == 401

    hooks: Options = {"key": key, "cost": cost, "skip": skip, "on_limit": on_limit, "count": count}
    guard = AsyncGuard(Terms(limits="4/minute", **hooks))
    charge = await guard.enter(_call(user="1"))
    assert (charge.key, charge.decision.remaining) == ("1", 2)
    assert (await guard.enter(_call("/free"))).ruling.kind == "unlimited"
    assert await guard.response(_call(), charge.ruling) == "mine"
    await guard.leave(charge, 200)
    assert charge.units == 0
    await guard.close()


class Stuck(ManualClock):
    """A clock whose sleepers sleep until they are cancelled."""

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.Event().wait()


async def test_whoever_is_cancelled_in_the_queue_gives_its_place_back() -> None:
    """A client that hangs up while it is held costs nothing."""
    limit = Limit(1, per=1, algorithm="leaky_bucket", capacity=2)
    guard = AsyncGuard(Terms(limits=limit, clock=Stuck(1)))
    assert (await guard.enter(_call())).decision.allowed
    held = asyncio.create_task(guard.enter(_call()))
    await asyncio.sleep(0)
    assert not (await guard.enter(_call())).decision.allowed
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    again = asyncio.create_task(guard.enter(_call()))
    await asyncio.sleep(0)
    assert not again.done()  # held as the second, so there was a place
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    await guard.close()


@pytest.mark.parametrize("key", ["header", "cookies:x", ["header:X", "what"], [], 42])
def test_a_wrong_source_is_refused_at_once(key: Any) -> None:
    """Not at the first request."""
    with pytest.raises(ConfigError):
        Guard(Terms(limits="1/s", key=key))


def test_a_limiter_of_the_other_kind_is_refused() -> None:
    """An event loop must not be blocked, and threads have none."""
    with pytest.raises(ConfigError, match="AsyncLimiter"):
        AsyncGuard(Terms(limiter=Limiter("1/s")))
    with pytest.raises(ConfigError, match="not a Limiter"):
        Guard(Terms(limiter=AsyncLimiter("1/s")))


def test_the_refusal_has_the_style_that_was_asked_for(make: Make) -> None:
    """Headers of a denial follow the terms' style."""
    guard = make(limits="1/minute", style=Style(draft=None, legacy=False))
    guard.enter(_call())
    ruling = guard.enter(_call()).ruling
    names = {name for name, _ in getattr(guard, "guard", guard).refusal(ruling).headers}
    assert names == {"Retry-After", "Content-Type", "Cache-Control"}


def test_a_guard_for_threads_takes_no_async_hook() -> None:
    """What nobody awaits is true, and everybody would be skipped."""

    async def skip(call: Any) -> bool:
        return False

    with pytest.raises(ConfigError, match="is async"):
        Guard(Terms(limits="1/minute", skip=skip))


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
def test_a_guard_stands_by_as_it_is_told(kind: Any) -> None:
    """With a store that is away, each of four machines lets a quarter pass."""
    terms = Terms(
        limits="8/minute",
        store="redis://127.0.0.1:1",
        on_failure="local",
        local_fallback=LocalFallback(nodes=4),
    )

    async def admitted() -> int:
        guard = kind(terms)
        charges = []
        for _ in range(5):
            charge = guard.enter(_call())
            charges.append(charge if kind is Guard else await charge)
        closed = guard.close()
        if closed is not None:
            await closed
        return sum(charge.decision.allowed for charge in charges)

    assert asyncio.run(admitted()) == 2
