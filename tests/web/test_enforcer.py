"""Enforcers: the same behaviour in threads and in an event loop, for every framework."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    ConfigError,
    Decision,
    InvalidCost,
    Limit,
    Limiter,
    LocalFallback,
    Request,
    StoreUnavailable,
)
from ratekeeper.core.model import AppliedRule, CheckResult, ResultKind
from ratekeeper.core.steps import asked, run, run_async
from ratekeeper.testing import ManualClock
from ratekeeper.web.answers import Denial, Style
from ratekeeper.web.charges import joint_result as joined
from ratekeeper.web.enforcer import PASSED, Charge, Enforcer, UncheckableRequest
from ratekeeper.web.options import EnforcerOptions, OptionArguments
from ratekeeper.web.requests import WebRequest, WsgiRequest
from tests.web.enforcers import Driven, in_thread

RULES = """
version: 1
rules:
  - id: orders
    match: {endpoint: "/orders/{id}"}
    by: [api_key]
    limits: ["2/minute"]
allow: ["api_key:sk_internal_*"]
"""


def _request(
    path: str = "/", *, peer: str = "192.0.2.1", route: str | None = None, **headers: str
) -> WsgiRequest:
    environ = {"PATH_INFO": path, "REMOTE_ADDR": peer, "REQUEST_METHOD": "GET"}
    for name, value in headers.items():
        environ[f"HTTP_{name.upper()}"] = value
    return WsgiRequest(environ, route=route)


Make = Callable[..., Any]


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> type[Limiter | AsyncLimiter]:
    """Return the class of limiter that the enforcer uses."""
    found: type[Limiter | AsyncLimiter] = request.param
    return found


@pytest.fixture
def make(kind: type[Limiter | AsyncLimiter]) -> Iterator[Make]:
    """Create enforcers of either kind from options, on a manual clock."""
    made: list[Any] = []
    with asyncio.Runner() as runner:

        def made_of(**options: Any) -> Any:
            if "limiter" not in options:
                options.setdefault("clock", ManualClock(1_000))
            enforcer = Enforcer(EnforcerOptions(**options), kind)
            awaited = lambda steps: runner.run(run_async(steps))  # noqa: E731 - short
            made.append(Driven(enforcer, run if kind is Limiter else awaited))
            return made[-1]

        yield made_of
        for enforcer in made:
            enforcer.close()


# ── The counted key ─────────────────────────────────────────────────────────────────────────────


def test_by_default_the_address_is_counted(make: Make) -> None:
    """Each address has its own quota."""
    enforcer = make(limits="2/minute")
    found = [
        enforcer.enter(_request(peer=peer)).decision for peer in ("192.0.2.1",) * 3 + ("192.0.2.2",)
    ]
    assert [decision.allowed for decision in found] == [True, True, False, True]


def test_the_first_source_that_finds_a_value_is_the_key(make: Make) -> None:
    """Requests without the header are counted by address."""
    enforcer = make(limits="1/minute", key=["header:X-API-Key", "address"])
    assert enforcer.enter(_request(x_api_key="a")).decision.allowed
    assert not enforcer.enter(_request(peer="192.0.2.9", x_api_key="a")).decision.allowed
    assert enforcer.enter(_request(x_api_key="b")).decision.allowed
    assert enforcer.enter(_request()).decision.allowed
    assert not enforcer.enter(_request()).decision.allowed


@pytest.mark.parametrize("found", ["user:42", ("tenant:1", "user:42")])
def test_a_function_may_return_the_key(make: Make, found: Any) -> None:
    """None selects the address."""
    enforcer = make(
        limits="1/minute", key=lambda request: found if request.header("user") else None
    )
    assert enforcer.enter(_request(user="x")).key == found
    assert enforcer.enter(_request()).decision.allowed
    assert not enforcer.enter(_request(user="x", peer="192.0.2.5")).decision.allowed


def test_per_route_counts_each_route_separately(make: Make) -> None:
    """Other numbers in the path are the same endpoint."""
    enforcer = make(limits="1/minute", per_route=True)
    assert enforcer.enter(_request("/users/1", route="/users/{id}")).decision.allowed
    assert not enforcer.enter(_request("/users/2", route="/users/{id}")).decision.allowed
    assert enforcer.enter(_request("/orders")).decision.allowed
    assert not enforcer.enter(_request("//orders/")).decision.allowed


def test_a_key_function_works_with_per_route(make: Make) -> None:
    """The route is one more part of the key."""
    enforcer = make(limits="1/minute", per_route=True, key=lambda request: ("a", "b"))
    assert enforcer.enter(_request("/x")).key == ("a", "b", "/x")


@pytest.mark.parametrize("path", ["/" + "x" * 9_000, "/é\x1f\0", "/" + "%ff" * 400])
def test_no_path_is_too_long_to_be_counted(make: Make, path: str) -> None:
    """A long or unusual path is an ordinary endpoint and not an error."""
    enforcer = make(limits="1/minute", per_route=True)
    assert enforcer.enter(_request(path)).decision.allowed
    assert not enforcer.enter(_request(path)).decision.allowed
    assert enforcer.enter(_request(path + "y")).decision.allowed


def test_rules_check_the_request_that_identity_makes(make: Make) -> None:
    """The rules' `by` and lists decide; a request without a rule passes."""
    enforcer = make(rules=RULES, identify={"api_key": "header:X-API-Key"})
    orders = _request("/orders/1", route="/orders/{id}", x_api_key="sk_1")
    kinds = [enforcer.enter(orders).result for _ in range(3)]
    assert [result.decision.allowed for result in kinds] == [True, True, False]
    assert enforcer.enter(_request("/free", x_api_key="sk_1")).result.kind == "unlimited"
    internal = _request("/orders/1", route="/orders/{id}", x_api_key="sk_internal_7")
    assert enforcer.enter(internal).result.kind == "exempt"


def test_a_key_function_may_make_the_request_for_rules(make: Make) -> None:
    """Its Request is checked; None selects the one from identity."""
    asked = Request(api_key="sk_2", endpoint="/orders/9")
    enforcer = make(rules=RULES, key=lambda request: asked if request.header("mine") else None)
    assert enforcer.enter(_request(mine="1")).key is asked
    assert enforcer.enter(_request("/orders/1")).result.kind == "limited"


def test_a_given_limiter_is_used_and_not_closed(
    make: Make, kind: type[Limiter | AsyncLimiter], tmp_path: Path
) -> None:
    """It still works after the enforcer is closed."""
    clock = ManualClock()
    limiter = kind("1/minute", store=f"shared://{tmp_path}/x", clock=clock)
    enforcer = make(limiter=limiter)
    assert enforcer.clock is clock
    assert enforcer.enter(_request()).decision.allowed
    enforcer.close()
    assert not enforcer.enter(_request()).decision.allowed
    limiter.store.close()


def test_a_given_limiter_with_rules_checks_requests(
    make: Make, kind: type[Limiter | AsyncLimiter]
) -> None:
    """A limiter that has rules takes the Request that identity makes."""
    limiter = kind.from_rules(RULES, clock=ManualClock())
    enforcer = make(limiter=limiter, identify={"api_key": "header:X-API-Key"})
    assert (
        enforcer.enter(_request("/orders/1", x_api_key="sk_1")).result.applied[0].rule == "orders"
    )


# ── Costs and outcomes ─────────────────────────────────────────────────────────────────────────


def test_a_function_may_return_the_cost(make: Make) -> None:
    """Each request spends its own cost."""
    enforcer = make(limits="10/minute", cost=lambda request: int(request.header("cost") or 1))
    assert enforcer.enter(_request(cost="7")).decision.remaining == 3
    assert enforcer.enter(_request()).decision.remaining == 2


def test_a_skipped_request_is_not_counted(make: Make) -> None:
    """It has a charge whose settlement has no effect."""
    enforcer = make(limits="1/minute", skip=lambda request: request.path == "/healthz")
    for _ in range(3):
        charge = enforcer.enter(_request("/healthz"))
        assert charge.result.kind == "unlimited"
        charge.settle(5)
        enforcer.leave(charge, 200)
    assert enforcer.enter(_request()).decision.allowed


def test_the_settled_cost_is_spent(make: Make) -> None:
    """100 units were reserved and 37 used, so 37 are spent."""
    enforcer = make(limits="1000/minute", cost=100)
    charge = enforcer.enter(_request())
    charge.settle(37)
    enforcer.leave(charge, 200)
    enforcer.leave(charge, 200)
    assert enforcer.enter(_request()).decision.remaining == 1000 - 37 - 100


@pytest.mark.parametrize(("status", "counted"), [(401, True), (403, True), (200, False)])
def test_only_outcomes_that_count_are_kept(make: Make, status: int, counted: bool) -> None:
    """A successful login is refunded; a failed one is spent."""
    enforcer = make(limits="1/minute", count=lambda status: status in {401, 403})
    charge = enforcer.enter(_request())
    # A request is charged before the application runs, so a concurrent guess is denied.
    assert not enforcer.enter(_request()).decision.allowed
    enforcer.leave(charge, status)
    assert enforcer.enter(_request()).decision.allowed is not counted


def test_without_an_outcome_a_request_counts(make: Make) -> None:
    """A client that closes the connection before the answer has still guessed."""
    enforcer = make(limits="1/minute", count=lambda status: status == 401)
    enforcer.leave(enforcer.enter(_request()))
    assert not enforcer.enter(_request()).decision.allowed


def test_slow_logins_do_not_make_room_for_guesses(make: Make) -> None:
    """Five successful logins take a minute each. They are refunded then, when time has returned
    their units: five guesses pass, not ten."""
    enforcer = make(limits="5/minute", count=lambda status: status == 401)
    slow = [enforcer.enter(_request()) for _ in range(5)]
    enforcer.clock.advance(60)
    assert sum(enforcer.enter(_request()).decision.allowed for _ in range(20)) == 5
    for charge in slow:
        enforcer.leave(charge, 200)
    assert not enforcer.enter(_request()).decision.allowed


def test_a_leaky_bucket_delays_before_the_application_runs(make: Make) -> None:
    """Each request is served a second after the previous one, by the limiter's clock."""
    enforcer = make(limits=Limit(1, per=1, algorithm="leaky_bucket", capacity=3))
    times = []
    for _ in range(3):
        assert enforcer.enter(_request()).decision.allowed
        times.append(enforcer.clock.now_ns() // 10**9)
    assert times == [1000, 1001, 1002]


# ── Errors ─────────────────────────────────────────────────────────────────────────────────────


def test_a_cost_that_can_never_fit_is_a_422(make: Make) -> None:
    """The answer says that waiting does not help."""
    with pytest.raises(UncheckableRequest) as refused:
        make(limits="10/minute", cost=lambda request: 11).enter(_request())
    assert refused.value.answer.status == 422


@pytest.mark.parametrize("per_route", [False, True])
@pytest.mark.parametrize(
    "key",
    ["", " ", "a\x1fb", "x" * 600, "\ud800", 42, ("a", ""), ("a", None), ("x" * 500,) * 15,
     Request(user="x" * 600), Request(user="a\x1fb", attributes={"region": "\ud800"})],
)  # fmt: skip
def test_a_key_that_a_client_chose_is_counted(make: Make, key: Any, per_route: bool) -> None:
    """The client may send an empty or an over-long identifier. It is limited like any other."""
    rules = "{version: 1, rules: [{id: a, by: [user, region], limits: 2/minute}]}"
    by_rules = isinstance(key, Request)
    options: dict[str, Any] = {"rules": rules} if by_rules else {"limits": "2/minute"}
    if per_route and not by_rules:
        options["per_route"] = True
    enforcer = make(**options, key=lambda request: key)
    found = [enforcer.enter(_request()).decision.allowed for _ in range(3)]
    assert found == [True, True, False]


@pytest.mark.parametrize(
    "key", [("a",) * 17, (), object(), b"x", 1.5, True, [1], ("a", 1.5), Request(user=4)],  # type: ignore[arg-type]  # the tested case
)  # fmt: skip
def test_an_object_that_is_not_a_key_is_the_applications_error(make: Make, key: Any) -> None:
    """The client cannot fix it, so it is not a 400 with advice for developers."""
    with pytest.raises(TypeError, match="the key function returned"):
        make(limits="10/minute", key=lambda request: key).enter(_request())


def test_hooks_see_the_clients_address(make: Make) -> None:
    """It is the address that the limits count by, behind trusted proxies."""
    seen = []

    def hook(request: WebRequest) -> Any:
        seen.append(request.address)
        return None

    proxied = WsgiRequest({"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": "203.0.113.9"})
    options: dict[str, Any] = {"limits": "1/minute", "trusted_proxies": ["10.0.0.0/8"]}
    enforcer = make(**options, key=hook, skip=hook, cost=lambda request: hook(request) or 1)
    assert enforcer.enter(proxied).decision.allowed
    assert seen == ["203.0.113.9"] * 3
    assert WsgiRequest({"REMOTE_ADDR": "10.0.0.1"}).address == "10.0.0.1"


@pytest.mark.parametrize("cost", [-1, "3", 1.5])
def test_an_invalid_cost_is_a_400(make: Make, cost: Any) -> None:
    """A cost that is read from a request may have any value."""
    with pytest.raises(UncheckableRequest) as refused:
        make(limits="10/minute", cost=lambda request: cost).enter(_request())
    assert refused.value.answer.status == 400


@pytest.mark.parametrize("hook", ["key", "cost", "skip"])
@pytest.mark.parametrize("error", [ConfigError, ZeroDivisionError])
def test_a_hook_that_raises_is_the_applications_error(
    make: Make, hook: str, error: type[Exception]
) -> None:
    """The error reaches the application unchanged, even a ConfigError."""

    def raising(request: object) -> None:
        raise error("mine")

    with pytest.raises(error, match="mine"):
        make(limits="10/minute", **{hook: raising}).enter(_request())


class Failing:
    """A stand-in for a limiter whose store cannot settle."""

    def settle(self, *arguments: Any) -> Any:
        raise StoreUnavailable("the store is unavailable")


def test_a_store_that_fails_while_settling_is_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has its response, and the request keeps its charge."""
    enforcer = make(limits="10/minute", key=lambda request: "secret-key")
    charge = enforcer.enter(_request())
    charge.limiters._made = {Limiter: Failing(), AsyncLimiter: Failing()}
    charge.refund()
    with caplog.at_level(logging.WARNING, "ratekeeper.web"):
        enforcer.leave(charge, 200)
    assert "the store is unavailable" in caplog.text
    assert "secret-key" not in caplog.text
    charge.limiters._made.clear()


def test_on_limit_returns_the_response_to_a_denial(make: Make) -> None:
    """It takes the request and a Denial. Without a hook, or for None, the response is a 429."""

    def on_limit(request: Any, denial: Denial) -> Any:
        return request.path, denial.status, denial.retry_after

    result = (
        make(limits="1/minute")
        .enter(_request("/x"))
        .result._replace(decision=Decision(False, LIMIT, 0, retry_after_ns=11_500_000_000))
    )
    enforcer = make(limits="1/minute", on_limit=on_limit)
    assert enforcer.response(_request("/x"), result) == ("/x", 429, 12)
    for hook in (None, lambda request, denial: None):
        default = make(limits="1/minute", on_limit=hook).response(_request("/x"), result).answer
        assert (default.status, dict(default.headers)["Retry-After"]) == (429, "12")


@pytest.mark.parametrize(
    ("kind_of_result", "status", "called"),
    [("limited", 429, "on_limit"), ("unavailable", 503, "on_unavailable"), ("blocked", 403, "")],
)
def test_each_status_has_its_own_hook(
    make: Make, kind_of_result: ResultKind, status: int, called: str
) -> None:
    """A hook that answers 429 cannot turn the 503 of a store that is away into a 429."""
    calls: list[str] = []
    enforcer = make(
        limits="1/minute",
        on_limit=lambda request, denial: calls.append("on_limit"),
        on_unavailable=lambda request, denial: calls.append("on_unavailable"),
    )
    answer = enforcer.response(_request(), _result(allowed=False, kind=kind_of_result))
    assert (answer.status, calls) == (status, [called] if called else [])


# ── Several enforcers on one store ────────────────────────────────────────────────────────────────


def test_route_enforcers_share_the_store_and_the_options(make: Make) -> None:
    """Each has its own count, for the same subjects, on one store."""
    enforcer = make(
        limits="3/minute", key="header:user", skip=lambda request: request.path == "/free"
    )
    enforcer_options = EnforcerOptions(limits="1/minute")
    route, other = (
        enforcer.route_enforcer(enforcer_options, "GET /a"),
        enforcer.route_enforcer(enforcer_options, "GET /b"),
    )
    assert route.enter(_request(user="1")).decision.allowed
    assert not route.enter(_request(user="1", peer="192.0.2.7")).decision.allowed
    assert other.enter(_request(user="1")).decision.allowed
    assert enforcer.enter(_request(user="1")).decision.remaining == 2
    assert enforcer.enter(_request("/free", user="1")).result.kind == "unlimited"
    assert not route.enter(_request("/free", user="1")).decision.allowed, "skip is not inherited"
    assert route.enter(_request(user="2")).result.applied[0].rule == "GET /a"


@pytest.mark.parametrize(
    ("outer", "own", "allowed", "kind_of_result"),
    [
        ("open", None, True, "limited"),
        ("open", "closed", False, "unavailable"),
        ("closed", None, False, "unavailable"),
        ("closed", "open", True, "limited"),
    ],
)
def test_a_route_has_its_own_failure_policy(
    make: Make, outer: Any, own: Any, allowed: bool, kind_of_result: str
) -> None:
    """By default it is that of the application."""
    enforcer = make(limits="9/minute", store="redis://127.0.0.1:1", on_failure=outer)
    route = enforcer.route_enforcer(EnforcerOptions(limits="1/minute", on_failure=own), "login")
    result = route.enter(_request()).result
    assert (result.decision.allowed, result.kind) == (allowed, kind_of_result)
    assert result.decision.degraded
    assert enforcer.enter(_request()).decision.allowed is (outer == "open")


def test_routes_use_the_local_fallback_of_a_given_limiter() -> None:
    """Each of four machines admits a quarter of a route's limits while the store is away."""
    limiter = Limiter(
        "99/minute",
        store="redis://127.0.0.1:1",
        on_failure="local",
        local_fallback=LocalFallback(nodes=4),
    )
    enforcer = in_thread(limiter=limiter)
    route = enforcer.route_enforcer(EnforcerOptions(limits="8/minute"), "r")
    assert [route.enter(_request()).decision.allowed for _ in range(3)] == [True, True, False]
    enforcer.close()
    limiter.close()


def test_the_same_options_and_name_give_the_same_enforcer() -> None:
    """It is made once and then reused for every request."""
    enforcer = Enforcer(EnforcerOptions(store="memory://"), Limiter)
    enforcer_options = EnforcerOptions(limits="1/minute")
    assert enforcer.route_enforcer(enforcer_options, "a") is enforcer.route_enforcer(
        enforcer_options, "a"
    )
    assert enforcer.route_enforcer(enforcer_options, "a") is not enforcer.route_enforcer(
        enforcer_options, "b"
    )
    assert enforcer.route_enforcer(
        EnforcerOptions(limits="1/minute"), "a"
    ) is not enforcer.route_enforcer(enforcer_options, "a")
    enforcer.close()


def test_a_route_enforcer_beside_rules_counts_by_address(make: Make) -> None:
    """A key function that makes Requests for rules is not used for a route's limits."""
    enforcer = make(rules=RULES, key=lambda request: Request(api_key="sk_1"))
    route = enforcer.route_enforcer(EnforcerOptions(limits="1/minute"), "r")
    assert route.enter(_request()).decision.allowed
    assert not route.enter(_request()).decision.allowed


def test_a_closed_enforcer_opens_again_when_it_is_used(make: Make) -> None:
    """An application that starts twice, as in tests, has its limits both times."""
    enforcer = make(limits="1/minute")
    enforcer_options = EnforcerOptions(limits="1/minute")
    for _ in range(2):
        assert enforcer.enter(_request()).decision.allowed
        assert not enforcer.enter(_request()).decision.allowed
        assert enforcer.route_enforcer(enforcer_options, "r").enter(_request()).decision.allowed
        enforcer.close()


def test_an_enforcer_without_limits_allows_requests(make: Make) -> None:
    """It serves the routes that have their own limits."""
    assert make().enter(_request()).result.kind == "unlimited"


# ── Asyncio alone ──────────────────────────────────────────────────────────────────────────────


async def test_every_hook_may_be_async() -> None:
    """Each hook is awaited, and plain hooks work too."""

    async def key(request: Any) -> str:
        return str(request.header("user"))

    async def cost(request: Any) -> int:
        return 2

    async def skip(request: Any) -> bool:
        return request.path == "/free"

    async def on_limit(request: Any, denial: Any) -> str:
        return "mine"

    async def on_unavailable(request: Any, denial: Any) -> str:
        return "sorry"

    async def count(status: int) -> bool:
        return status == 401

    hooks: OptionArguments = {
        "key": key,
        "cost": cost,
        "skip": skip,
        "on_limit": on_limit,
        "on_unavailable": on_unavailable,
        "count": count,
    }
    enforcer = Enforcer(EnforcerOptions(limits="4/minute", **hooks), AsyncLimiter)
    charge = await run_async(asked(enforcer.charge, _request(user="1")))
    assert (charge.key, charge.decision.remaining) == ("1", 2)
    free = await run_async(asked(enforcer.charge, _request("/free")))
    assert free.result.kind == "unlimited"
    for kind, response in (("limited", "mine"), ("unavailable", "sorry")):
        result = _result(allowed=False, kind=kind)
        assert await run_async(enforcer.answering(_request(), result)) == response
    await run_async(enforcer.leaving(charge, 200))
    assert charge.units == 0
    await enforcer.aclose()


class Stuck(ManualClock):
    """A clock whose sleepers sleep until they are cancelled."""

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.Event().wait()


async def test_a_request_cancelled_in_the_queue_returns_its_place() -> None:
    """A client that closes the connection while it waits is not charged."""
    limit = Limit(1, per=1, algorithm="leaky_bucket", capacity=2)
    enforcer = Enforcer(EnforcerOptions(limits=limit, clock=Stuck(1)), AsyncLimiter)

    async def enter() -> Charge:
        charge: Charge = await run_async(asked(enforcer.charge, _request()))
        return charge

    assert (await enter()).decision.allowed
    held = asyncio.create_task(enter())
    await asyncio.sleep(0)
    assert not (await enter()).decision.allowed
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    again = asyncio.create_task(enter())
    await asyncio.sleep(0)
    assert not again.done()  # it waits as the second request, so the place was free
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    await enforcer.aclose()


@pytest.mark.parametrize("key", ["header", "cookies:x", ["header:X", "what"], [], 42])
def test_a_wrong_source_is_rejected_at_once(key: Any) -> None:
    """The constructor raises the error, before the first request."""
    with pytest.raises(ConfigError):
        Enforcer(EnforcerOptions(limits="1/s", key=key))


def test_a_limiter_of_the_other_kind_is_rejected() -> None:
    """A Limiter would block the event loop, and a thread has no loop for an AsyncLimiter."""
    with pytest.raises(ConfigError, match="AsyncLimiter"):
        Enforcer(EnforcerOptions(limiter=Limiter("1/s")), AsyncLimiter)
    with pytest.raises(ConfigError, match="not a Limiter"):
        Enforcer(EnforcerOptions(limiter=AsyncLimiter("1/s")), Limiter)


def test_a_denial_has_the_configured_style(make: Make) -> None:
    """The headers of a denial follow the `style` option."""
    enforcer = make(limits="1/minute", style=Style(draft=None, legacy=False, node=""))
    enforcer.enter(_request())
    result = enforcer.enter(_request()).result
    names = {name for name, _ in enforcer.response(_request(), result).answer.headers}
    assert names == {"Retry-After", "Content-Type", "Cache-Control"}


def test_an_enforcer_for_threads_rejects_async_hooks() -> None:
    """A coroutine is true, so every request would be skipped."""

    async def skip(request: Any) -> bool:
        return False

    with pytest.raises(ConfigError, match="is async"):
        in_thread(limits="1/minute", skip=skip)


def test_the_local_fallback_is_configurable(make: Make) -> None:
    """While the store is unavailable, each of four machines admits a quarter."""
    enforcer = make(
        limits="8/minute",
        store="redis://127.0.0.1:1",
        on_failure="local",
        local_fallback=LocalFallback(nodes=4),
    )
    assert sum(enforcer.enter(_request()).decision.allowed for _ in range(5)) == 2


LIMIT = Limit(10, per=60)
APPLIED = AppliedRule("orders", [LIMIT])


def _result(
    *,
    allowed: bool = True,
    remaining: int = 9,
    degraded: bool = False,
    kind: ResultKind = "limited",
) -> CheckResult:
    decision = Decision(allowed, LIMIT, remaining, rule="orders", degraded=degraded)
    return CheckResult(decision, (APPLIED,), kind)


def charge_of(result: CheckResult, key: str, units: int) -> Charge:
    return Charge(result.decision, key, units, result=result)


def test_an_unsettled_charge_stays() -> None:
    """Without a report of the application there is nothing to apply."""
    assert charge_of(_result(), "k", 3).take() is None


def test_the_last_settlement_counts_and_is_applied_once() -> None:
    """Taking it a second time returns None."""
    charge = charge_of(_result(), "k", 100)
    charge.settle(50)
    charge.settle(37)
    assert charge.take() == (100, 37)
    assert charge.take() is None


def test_a_later_settlement_is_applied_as_a_difference() -> None:
    """It starts from the units that are charged by then."""
    charge = charge_of(_result(), "k", 100)
    charge.settle(37)
    charge.take()
    charge.settle(40)
    assert charge.take() == (37, 40)


UNIT_RULES = """
version: 1
rules:
  - {id: requests, by: user, limits: 10/hour}
  - {id: tokens, by: user, unit: tokens, limits: 1000/hour}
"""


@pytest.mark.parametrize(
    ("cost", "settled", "left"),
    [
        ({"tokens": 400}, {"units": 37}, [9, 963]),
        ({"requests": 2, "tokens": 400}, {"costs": {"tokens": 37}}, [8, 963]),
        ({"tokens": 400}, {"costs": {"requests": 3}}, [7, 600]),
        (1, {"costs": {"tokens": 37}}, [9, 963]),
        (lambda _: {"tokens": 400}, {"costs": {"tokens": 700}}, [9, 300]),
        ({"tokens": 400}, None, [10, 1_000]),
    ],
)
def test_a_charge_by_unit(make: Make, cost: Any, settled: Any, left: list[int]) -> None:
    """`cost` and the settlement may be costs by unit; a refund returns all of them."""
    limiter = Limiter.from_rules(UNIT_RULES)
    enforcer = make(
        rules=UNIT_RULES, store=limiter.store, cost=cost, key=lambda _: Request(user="ann")
    )
    charge = enforcer.enter(_request())
    with pytest.raises(InvalidCost, match='no limit counts "token"; did you mean "tokens"'):
        charge.settle(costs={"token": 1})
    if settled is None:
        charge.refund()
    else:
        charge.settle(**settled)
    enforcer.leave(charge, 200)
    explained = limiter.explain(Request(user="ann")).rules
    assert [each.decision and each.decision.remaining for each in explained] == left


def test_costs_by_unit_need_rules() -> None:
    """Limits without rules count one unit, so the option is rejected at startup."""
    with pytest.raises(InvalidCost, match='no limit counts "tokens"'):
        EnforcerOptions(limits="9/s", cost={"tokens": 3})


def test_an_outcome_that_does_not_count_is_free() -> None:
    """`count` takes precedence over `settle`: a successful login is free."""
    charge = charge_of(_result(), "k", 1)
    charge.settle(5)
    assert charge.take(counts=False) == (1, 0)


@pytest.mark.parametrize(
    "result",
    [
        _result(allowed=False, remaining=0),
        _result(degraded=True),
        _result(kind="exempt"),
        _result(kind="unlimited"),
        _result(allowed=False, kind="blocked"),
        _result(allowed=False, degraded=True, kind="unavailable"),
        PASSED,
    ],
    ids=["denied", "degraded", "exempt", "unlimited", "blocked", "unavailable", "passed"],
)
def test_a_request_that_was_not_charged_is_not_settled(result: CheckResult) -> None:
    """Its refund would return units that were never spent."""
    charge = charge_of(result, "k", 1)
    charge.refund()
    assert charge.take() is None
    charge.settle(5)
    assert charge.take(counts=False) is None


@pytest.mark.parametrize("units", [-1, 1.5, "3", None, True])
def test_an_invalid_settlement_raises(units: object) -> None:
    """The error appears where the application makes the mistake."""
    with pytest.raises(InvalidCost):
        charge_of(_result(), "k", 1).settle(units)  # type: ignore[arg-type]  # that is the point


@given(st.lists(st.one_of(st.integers(0, 50), st.none()), max_size=20))
def test_settlements_in_any_order_leave_the_last_one(words: list[int | None]) -> None:
    """Settling and applying in any order charges exactly the last settlement."""
    limiter = Limiter("1000/minute", clock=ManualClock())
    charge = charge_of(limiter.evaluate("k", 20), "k", 20)
    for units in words:
        if units is not None:
            charge.settle(units)
        elif due := charge.take():
            assert limiter.settle("k", *due).charged == due[1]
    if due := charge.take():
        limiter.settle("k", *due)
    said = [units for units in words if units is not None]
    assert limiter.peek("k").remaining == 1000 - (said[-1] if said else 20)


def test_the_tightest_of_several_results_is_reported() -> None:
    """All applied rules are listed."""
    other = AppliedRule("search", [Limit(5, per=1)])
    tight = CheckResult(
        Decision(True, other.limits[0], 2, rule="search"), (other,), "limited", ("s",)
    )
    whole = joined([_result(), tight])
    assert whole.decision is tight.decision
    assert whole.applied == (APPLIED, other)
    assert whole.shadow_denied == ("s",)


def test_counted_subjects_are_complete_or_absent() -> None:
    """They belong to the applied rules one by one."""
    known = _result()._replace(counted=(("user:1", 2),))
    assert joined([known, known]).counted == (("user:1", 2), ("user:1", 2))
    assert joined([known, _result()]).counted == ()


def test_a_denial_is_reported_before_allowed_results() -> None:
    """Only the last result can deny, whatever remains in the others."""
    allowed, denied = _result(remaining=0), _result(allowed=False, remaining=3)
    whole = joined([allowed, denied])
    assert whole.decision is denied.decision
    assert whole.kind == "limited"
    assert len(whole.applied) == 2


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (("unlimited", "limited"), "limited"),
        (("exempt", "limited"), "limited"),
        (("limited", "exempt"), "limited"),
        (("unlimited", "exempt"), "exempt"),
        (("unlimited", "unlimited"), "unlimited"),
    ],
)
def test_an_exempt_result_does_not_hide_a_limit(
    kinds: tuple[ResultKind, ResultKind], kind: ResultKind
) -> None:
    """A request that one rule exempts and another limits is limited."""
    assert joined([_result(kind=each) for each in kinds]).kind == kind


def test_a_blocked_result_has_no_numbers() -> None:
    """A blocked client learns nothing about the limits that it passed before."""
    blocked = _result(allowed=False, kind="blocked")
    assert joined([_result(), blocked]) is blocked


def test_the_repr_of_a_charge_has_no_key() -> None:
    """It shows the units and the decision."""
    assert repr(charge_of(_result(), "secret", 2)) == (
        "<Charge of 2 units: <Decision allowed remaining=9/10 reset_after=0 rule='orders'>>"
    )
