"""HTTP clients keep limits, wait as long as servers request, and keep a retry budget."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    InvalidCost,
    InvalidKey,
    InvalidOption,
    Limit,
    Limiter,
    LimitExceeded,
    LocalFallback,
    RatekeeperError,
    Request,
    StoreUnavailable,
)
from ratekeeper.decide.store import Store
from ratekeeper.httpx import (
    ADVICE_NS_MAX,
    DRAIN_BYTES_MAX,
    PAUSE_NS_MAX,
    AsyncLimitTransport,
    AsyncRetryTransport,
    LimitTimeout,
    LimitTransport,
    RetryAdvice,
    RetryTransport,
    retry_advice_of,
)
from ratekeeper.testing import ManualClock, limiting_off
from tests.failing_store import PartlyFailing

SECOND = 1_000_000_000
MANY = "1000/second"
URL = "http://api.test/v1/orders"


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that knows how much of it was read, and whether it was closed."""

    def __init__(self, chunks: int = 2, size: int = 10) -> None:
        self.chunks, self.size = chunks, size
        self.read = 0
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(self.chunks):
            self.read += self.size
            yield b"x" * self.size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


class Origin:
    """A server that returns the given responses and records each request's time in seconds."""

    def __init__(
        self, *answers: tuple[int, dict[str, str]] | httpx.Response, clock: ManualClock
    ) -> None:
        self.answers = list(answers)
        self.clock = clock
        self.times: list[float] = []
        self.bodies: list[Body] = []
        self.sent: list[bytes] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.times.append(self.clock.now_ns() / SECOND)
        self.sent.append(request.content)
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        status, headers = answer
        self.bodies.append(Body())
        return httpx.Response(status, headers=headers, stream=self.bodies[-1])


Ask = Callable[..., httpx.Response]


def sync_ask(origin: Origin, **settings: Any) -> Ask:
    settings = {"clock": origin.clock, "random": lambda: 0.0, "budget": MANY, **settings}
    client = httpx.Client(transport=RetryTransport(httpx.MockTransport(origin), **settings))
    return lambda method="GET", url=URL, **more: client.request(method, url, **more)


def async_ask(origin: Origin, **settings: Any) -> Ask:
    settings = {"clock": origin.clock, "random": lambda: 0.0, "budget": MANY, **settings}
    transport = AsyncRetryTransport(httpx.MockTransport(origin), **settings)

    async def ask(method: str = "GET", url: str = URL, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.request(method, url, **more)

    return lambda *args, **more: asyncio.run(ask(*args, **more))


@pytest.fixture(params=[sync_ask, async_ask], ids=["sync", "async"])
def asking(request: pytest.FixtureRequest) -> Callable[..., Ask]:
    """Run each test with the sync and with the async transport."""
    chosen: Callable[..., Ask] = request.param
    return chosen


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_767_225_600)


def after(origin: Origin) -> list[float]:
    """Return the times of the requests, in seconds after the first."""
    return [round(time - origin.times[0], 6) for time in origin.times]


# ------------------------------------------------------------------------------------ waits


def test_the_wait_is_as_long_as_the_response_requests(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """Without a random part it is exact, and then the request passes."""
    origin = Origin((429, {"Retry-After": "5"}), (200, {}), clock=clock)
    assert asking(origin)().status_code == 200
    assert after(origin) == [0, 5]


def test_without_advice_the_spread_doubles(asking: Callable[..., Ask], clock: ManualClock) -> None:
    """Waits are at most 0.5 s, 1 s, 2 s, 4 s after the first, second, … attempt."""
    origin = Origin((429, {}), clock=clock)
    assert asking(origin, random=lambda: 1.0)().status_code == 429
    assert after(origin) == [0, 0.5, 1.5, 3.5, 7.5]


def test_a_long_wait_is_extended_by_up_to_a_quarter(clock: ManualClock) -> None:
    """One second would not spread many clients that wait for 40 seconds."""
    origin = Origin((429, {"Retry-After": "40"}), (200, {}), clock=clock)
    assert sync_ask(origin, random=lambda: 1.0)().status_code == 200
    assert after(origin) == [0, 50]


@given(
    asked_s=st.integers(0, 100),
    randoms=st.lists(st.floats(0, 1, exclude_max=True), min_size=20, max_size=20),
    wait_max=st.integers(0, 300),
)
def test_never_before_the_time_and_never_beyond_the_bound(
    asked_s: int, randoms: list[float], wait_max: int
) -> None:
    """Each wait is at least as long as requested, and all together stay within wait_max.

    The caller gets the origin's last response.
    """
    clock = ManualClock()
    origin = Origin((429, {"Retry-After": str(asked_s)}), clock=clock)
    drawn = iter(randoms)
    ask = sync_ask(origin, random=lambda: next(drawn), wait_max=wait_max, attempts_max=8)
    assert ask().status_code == 429
    waits = [later - before for before, later in zip(origin.times, origin.times[1:], strict=False)]
    assert all(wait >= asked_s - 1e-6 for wait in waits)
    assert sum(waits) <= wait_max + 1e-6
    assert len(origin.times) <= 8


# ----------------------------------------------------------------------------------- which requests


@pytest.mark.parametrize(
    ("status", "method", "attempts"),
    [
        (429, "GET", 3),
        (429, "POST", 3),
        (503, "GET", 3),
        (503, "DELETE", 3),
        (503, "POST", 1),
        (503, "PATCH", 1),
        (502, "GET", 1),
        (200, "GET", 1),
    ],
)
def test_which_requests_are_repeated(
    clock: ManualClock, status: int, method: str, attempts: int
) -> None:
    """A 429 is repeated with any method, a 503 with idempotent methods, and nothing else."""
    origin = Origin((status, {}), clock=clock)
    assert sync_ask(origin, attempts_max=3)(method).status_code == status
    assert len(origin.times) == attempts


def test_a_body_of_bytes_is_sent_whole_each_time(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """The same JSON arrives with every attempt."""
    origin = Origin((429, {}), (200, {}), clock=clock)
    assert asking(origin)("POST", json={"a": 1}).status_code == 200
    assert origin.sent == [b'{"a":1}', b'{"a":1}']


def test_a_stream_is_not_sent_again(clock: ManualClock) -> None:
    """It can be read only once, so the response is returned."""
    origin = Origin((429, {}), clock=clock)
    assert sync_ask(origin)("POST", content=iter([b"a", b"b"])).status_code == 429
    assert origin.sent == [b"ab"]


def test_an_async_stream_is_not_sent_again(clock: ManualClock) -> None:
    """This holds for AsyncClient, too."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"

    origin = Origin((429, {}), clock=clock)
    assert async_ask(origin)("POST", content=chunks()).status_code == 429
    assert origin.sent == [b"a"]


# ------------------------------------------------------------------------------------ attempts


def test_attempts_are_bounded_and_the_last_answer_is_returned(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """After three attempts the denial is returned with its body."""
    origin = Origin((429, {"Retry-After": "1"}), clock=clock)
    response = asking(origin, attempts_max=3)()
    assert (response.status_code, response.content) == (429, b"x" * 20)
    assert after(origin) == [0, 1, 2]


def test_a_wait_beyond_the_bound_is_not_started(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """The response is returned at once."""
    origin = Origin((429, {"Retry-After": "61"}), clock=clock)
    assert asking(origin, wait_max=timedelta(minutes=1))().status_code == 429
    assert after(origin) == [0]
    assert clock.now_ns() == 1_767_225_600 * SECOND


def test_retries_are_a_share_of_the_traffic(clock: ManualClock) -> None:
    """100 failing requests cause about 15 retries: the reserve of 5 and a tenth of 100."""
    origin = Origin((503, {}), clock=clock)
    ask = sync_ask(origin, budget="5/day")
    for _ in range(100):
        assert ask().status_code == 503
    # The first request adds nothing, because the reserve is full.
    assert 100 + 5 + 9 <= len(origin.times) <= 100 + 5 + 10


def test_the_budget_grows_with_time(clock: ManualClock) -> None:
    """It grows by one retry a second, up to the reserve."""
    origin = Origin((503, {}), clock=clock)
    ask = sync_ask(origin, budget="1/second capacity 2")
    sent = []
    for pause_s in (0, 0, 1, 100):
        clock.advance(pause_s)
        before = len(origin.times)
        ask()
        sent.append(len(origin.times) - before)
    assert sent == [3, 1, 2, 3]


def test_each_origin_has_its_own_budget(clock: ManualClock) -> None:
    """A failing origin takes nothing from another."""
    origin = Origin((503, {}), clock=clock)
    ask = sync_ask(origin, budget="1/day")
    for url, sent in [("http://a.test", 2), ("http://a.test", 1), ("http://b.test", 2)]:
        before = len(origin.times)
        ask(url=url)
        assert len(origin.times) - before == sent, url


# ------------------------------------------------------------------------------------ pacing


def test_the_next_request_waits_if_nothing_is_left(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """After r=0;t=5 it is sent 5 s later, and is not denied."""
    origin = Origin((200, {"RateLimit": '"default";r=0;t=5'}), (200, {}), clock=clock)
    ask = asking(origin)
    ask()
    ask("POST")
    assert after(origin) == [0, 5]


@pytest.mark.parametrize(
    ("pace", "url", "times"),
    [
        (True, URL, [0, 5]),
        (True, "http://api.test/other", [0, 5]),
        (True, "http://api.test:8080/v1/orders", [0, 0]),
        (True, "https://api.test/v1/orders", [0, 0]),
        (False, URL, [0, 0]),
    ],
)
def test_pace_selects_the_requests_that_wait(
    clock: ManualClock, pace: bool, url: str, times: list[float]
) -> None:
    """Requests to the same origin wait, or none."""
    origin = Origin((200, {"RateLimit": '"default";r=0;t=5'}), (200, {}), clock=clock)
    ask = sync_ask(origin, pace=pace)
    ask()
    ask(url=url)
    assert after(origin) == times


def test_a_returned_denial_delays_the_next_request(clock: ManualClock) -> None:
    """This holds even if the denied request itself cannot be repeated."""
    origin = Origin((429, {"Retry-After": "5"}), (200, {}), clock=clock)
    ask = sync_ask(origin, attempts_max=1)
    assert [ask().status_code, ask().status_code] == [429, 200]
    assert after(origin) == [0, 5]


def test_a_pace_beyond_the_bound_is_ignored(clock: ManualClock) -> None:
    """The request is sent at once, and the origin answers it."""
    origin = Origin((429, {"Retry-After": "3600"}), clock=clock)
    ask = sync_ask(origin)
    assert [ask().status_code, ask().status_code] == [429, 429]
    assert after(origin) == [0, 0]


# ------------------------------------------------------------------------------------ the rest


def test_the_body_of_a_retried_answer_is_read_and_closed(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """Its connection can then be reused."""
    origin = Origin((429, {}), (200, {}), clock=clock)
    asking(origin)()
    assert [(body.read, body.closed) for body in origin.bodies] == [(20, True), (20, True)]


def test_a_huge_body_of_a_retried_answer_is_only_closed(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """Reading it would cost more than a new connection."""
    huge = Body(chunks=1_000, size=DRAIN_BYTES_MAX // 4)
    origin = Origin(httpx.Response(429, stream=huge), (200, {}), clock=clock)
    assert asking(origin)().status_code == 200
    assert huge.closed
    assert huge.read <= DRAIN_BYTES_MAX * 2


def test_a_response_that_was_already_read_is_accepted(
    asking: Callable[..., Ask], clock: ManualClock
) -> None:
    """Transports for tests return such responses."""
    answers = (httpx.Response(429, content=b"no"), httpx.Response(200, content=b"yes"))
    origin = Origin(*answers, clock=clock)
    assert asking(origin)().content == b"yes"


def test_a_host_that_is_too_long_for_a_key_is_no_error(clock: ManualClock) -> None:
    """A server can send a client there with a redirect."""
    origin = Origin((429, {"Retry-After": "5"}), (200, {}), clock=clock)
    assert sync_ask(origin)(url=f"http://{'.'.join(['a' * 60] * 20)}/").status_code == 200
    assert after(origin) == [0, 5]


def test_transport_errors_reach_the_caller(clock: ManualClock) -> None:
    """A failed connection is not repeated: the request may have had an effect."""

    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no")

    transport = RetryTransport(httpx.MockTransport(fail), clock=clock)
    with httpx.Client(transport=transport) as client, pytest.raises(httpx.ConnectError):
        client.get(URL)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attempts_max": 0}, "is not a whole number from 1 to 100"),
        ({"attempts_max": 2.5}, "is not a whole number"),
        ({"wait_max": -1}, "not a length of time"),
        ({"wait_max": "1m"}, "not a length of time"),
        ({"pace": "host"}, "pace='host' is not True or False"),
        ({"budget": 5}, "5 is not a rate"),
        ({"random": 5}, "random=5 is not a function"),
        ({"clock": 5}, "now_ns"),
    ],
)
def test_wrong_settings_are_rejected(settings: dict[str, Any], words: str) -> None:
    """The constructor raises an error with a correct example."""
    with pytest.raises(ConfigError, match=words):
        RetryTransport(httpx.MockTransport(lambda _: httpx.Response(200)), **settings)


def test_a_transport_of_the_other_kind_is_rejected() -> None:
    """At once, and not with the first request."""
    with pytest.raises(ConfigError, match=r"is not an httpx.BaseTransport; .*httpx.HTTPTransport"):
        RetryTransport(cast("Any", httpx.AsyncHTTPTransport()))
    with pytest.raises(ConfigError, match=r"is not an httpx.AsyncBaseTransport"):
        AsyncRetryTransport(cast("Any", httpx.HTTPTransport()))
    with pytest.raises(ConfigError, match=r"is not an httpx.BaseTransport"):
        LimitTransport("1/second", transport=cast("Any", httpx.AsyncHTTPTransport()))
    with pytest.raises(ConfigError, match=r"transport=5 is not an httpx.AsyncBaseTransport"):
        AsyncLimitTransport("1/second", transport=cast("Any", 5))


def test_wrong_arguments_of_a_limiting_transport_are_explained() -> None:
    """The error names the public class and shows a correct call."""
    with pytest.raises(InvalidOption, match=r'LimitTransport\("10/second", transport='):
        LimitTransport()  # type: ignore[call-arg]  # the mistake
    with pytest.raises(InvalidOption, match=r"LimitTransport\(…\)"):
        LimitTransport("1/second", httpx.HTTPTransport())  # type: ignore[call-arg]  # the mistake


# ------------------------------------------------------------------------------------ limits


def sync_limited(origin: Origin, limits: Any = "2/second", **settings: Any) -> Ask:
    settings = {"random": lambda: 0.0, "budget": MANY, **settings}
    if not isinstance(limits, Limiter):
        settings = {"clock": origin.clock, **settings}
    transport = LimitTransport(limits, transport=httpx.MockTransport(origin), **settings)
    client = httpx.Client(transport=transport, follow_redirects=True)
    return lambda method="GET", url=URL, **more: client.request(method, url, **more)


def async_limited(origin: Origin, limits: Any = "2/second", **settings: Any) -> Ask:
    settings = {"random": lambda: 0.0, "budget": MANY, **settings}
    if not isinstance(limits, AsyncLimiter):
        settings = {"clock": origin.clock, **settings}
    transport = AsyncLimitTransport(limits, transport=httpx.MockTransport(origin), **settings)
    # Not closed between requests: the transport would close its store.
    client = httpx.AsyncClient(transport=transport, follow_redirects=True)

    def ask(method: str = "GET", url: str = URL, **more: Any) -> httpx.Response:
        return asyncio.run(client.request(method, url, **more))

    return ask


@pytest.fixture(params=[sync_limited, async_limited], ids=["sync", "async"])
def limited(request: pytest.FixtureRequest) -> Callable[..., Ask]:
    """Run each test with the sync and with the async transport."""
    chosen: Callable[..., Ask] = request.param
    return chosen


def limiter_for(limited: Callable[..., Ask], limits: str, **options: Any) -> Any:
    """Return a limiter that the transport of `limited` takes."""
    return (Limiter if limited is sync_limited else AsyncLimiter)(limits, **options)


@pytest.fixture
def store(clock: ManualClock) -> Store:
    """A store that several transports share."""
    return Limiter("1/second", clock=clock).store


OK = (200, {"Content-Length": "0"})
SPENT = (200, {"RateLimit": '"default";r=0;t=20'})


def test_a_request_waits_until_the_limit_has_room(
    limited: Callable[..., Ask], clock: ManualClock
) -> None:
    """Two requests go at once, and then two a second."""
    origin = Origin(OK, clock=clock)
    ask = limited(origin)
    assert [ask().status_code for _ in range(5)] == [200] * 5
    assert [round(each, 3) for each in after(origin)] == [0, 0, 1, 1, 2]


def test_a_limiter_counts_requests_as_they_leave(
    limited: Callable[..., Ask], clock: ManualClock
) -> None:
    """Two requests go at once, and then one every half second."""
    origin = Origin(OK, clock=clock)
    ask = limited(origin, limiter_for(limited, "2/second", clock=clock))
    assert [ask().status_code for _ in range(5)] == [200] * 5
    assert after(origin) == [0, 0, 0.5, 1, 1.5]


def test_a_wait_beyond_the_bound_raises_and_spends_nothing(
    limited: Callable[..., Ask], clock: ManualClock
) -> None:
    """The error has the request and the time; after that time the request is sent."""
    origin = Origin(OK, clock=clock)
    ask = limited(origin, "1/hour", wait_max=timedelta(minutes=1))
    ask()
    for _ in range(3):
        with pytest.raises(LimitTimeout, match=r"^POST http://api\.test was not sent: .* 3600\."):
            ask("POST")
    with pytest.raises(httpx.TimeoutException) as caught:
        ask()
    error = caught.value
    assert isinstance(error, LimitTimeout)
    assert (str(error.request.url), error.retry_after, error.decision.allowed) == (URL, 3600, False)
    assert after(origin) == [0]
    clock.advance(error.retry_after)
    ask()
    assert [round(each) for each in after(origin)] == [0, 3600]


def test_the_error_is_one_that_callers_catch(clock: ManualClock) -> None:
    """It is an httpx error and a LimitExceeded, and survives a pickle."""
    ask = sync_limited(Origin(OK, clock=clock), "1/hour")
    ask()
    with pytest.raises(LimitTimeout) as caught:
        ask()
    error = caught.value
    for kind in (httpx.TimeoutException, httpx.TransportError, LimitExceeded, RatekeeperError):
        assert isinstance(error, kind)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (LimitTimeout, str(error))
    assert (copy.decision, copy.request.url) == (error.decision, URL)


@pytest.mark.parametrize(
    ("settings", "url", "times"),
    [
        ({}, URL, [0, 1]),
        ({}, "http://API.test:80/other?page=2", [0, 1]),
        ({}, "https://api.test/v1/orders", [0, 0]),
        ({}, "http://api.test:8080/v1/orders", [0, 0]),
        ({"key": "partner"}, "http://other.test", [0, 1]),
        ({"key": ("partner", "7")}, "http://other.test", [0, 1]),
        ({"key": lambda request: request.url.path}, "http://other.test/v1/orders", [0, 1]),
        ({"key": lambda request: request.url.path}, "http://api.test/other", [0, 0]),
    ],
)
def test_a_key_selects_the_requests_that_share_a_limit(
    clock: ManualClock, settings: dict[str, Any], url: str, times: list[float]
) -> None:
    """By default it is the origin."""
    origin = Origin(OK, clock=clock)
    ask = sync_limited(origin, "1/second", **settings)
    ask()
    ask(url=url)
    assert [round(each, 3) for each in after(origin)] == times


def test_a_function_returns_the_cost_of_a_request(
    limited: Callable[..., Ask], clock: ManualClock
) -> None:
    """For example, a POST costs two units and a GET one."""
    origin = Origin(OK, clock=clock)
    limiter = limiter_for(limited, "2/second", clock=clock)
    ask = limited(origin, limiter, cost=lambda request: len(request.method) - 2)
    for method in ("GET", "GET", "POST", "GET"):
        ask(method)
    assert after(origin) == [0, 0, 1, 1.5]


def test_a_redirect_is_a_request(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """Each hop waits for the limit of its own origin."""
    there = (302, {"Location": "http://api.test/there"})
    elsewhere = (302, {"Location": "http://other.test/"})
    origin = Origin(there, elsewhere, OK, clock=clock)
    assert limited(origin, "1/second")().status_code == 200
    assert [round(each, 3) for each in after(origin)] == [0, 1, 1]


def test_each_attempt_passes_the_limiter(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """A retry costs units as a first attempt does, after the wait that the server requests."""
    origin = Origin((429, {"Retry-After": "1"}), (429, {"Retry-After": "30"}), OK, clock=clock)
    limiter = limiter_for(limited, "2/minute", clock=clock)
    assert limited(origin, limiter)("POST").status_code == 200
    assert after(origin) == [0, 1, 31]


def test_one_bound_for_all_waits(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """A request that waited 40 s for the limit has 20 s left for the server's wait."""
    origin = Origin(OK, (429, {"Retry-After": "21"}), (429, {"Retry-After": "20"}), OK, clock=clock)
    ask = limited(origin, limiter_for(limited, "1/40s", clock=clock), pace=False)
    assert [ask().status_code, ask().status_code] == [200, 429]
    assert after(origin) == [0, 40]
    with pytest.raises(LimitTimeout):
        ask()  # 40 s for the limit, 20 s for the server, and 20 s more for the limit
    assert after(origin) == [0, 40, 80]


def test_transports_share_what_a_server_says(
    limited: Callable[..., Ask], clock: ManualClock, store: Store
) -> None:
    """After "nothing left for 20 s", other transports on the store wait, too; others do not."""
    origin = Origin(SPENT, OK, clock=clock)
    asks = [limited(origin, "9/second", store=store) for _ in range(2)]
    asks[0]()
    asks[1](url="http://other.test")
    asks[1]()
    assert after(origin) == [0, 0, 20]


def test_the_bound_includes_a_pause_that_another_transport_heard_of(
    limited: Callable[..., Ask], clock: ManualClock, store: Store
) -> None:
    """After 40 s of it, a request has 20 s left for the server's wait."""
    origin = Origin((429, {"Retry-After": "40"}), (429, {"Retry-After": "21"}), OK, clock=clock)
    asks = [limited(origin, "9/second", store=store, attempts_max=n) for n in (1, 2)]
    assert [ask().status_code for ask in asks] == [429, 429]
    assert after(origin) == [0, 40]


def test_a_request_that_is_held_back_spends_nothing(
    limited: Callable[..., Ask], clock: ManualClock, store: Store
) -> None:
    """If the server wants a longer wait than the bound, the request is not sent."""
    origin = Origin((429, {"Retry-After": "61"}), OK, clock=clock)
    asks = [limited(origin, "3/hour", store=store) for _ in range(2)]
    assert asks[0]().status_code == 429
    for ask in asks:
        with pytest.raises(LimitTimeout, match="the server asked for a pause; retry after 61"):
            ask()
    clock.advance(61)
    assert [ask().status_code for ask in asks] == [200, 200]


def test_without_pace_transports_share_no_pause(clock: ManualClock, store: Store) -> None:
    """The server's answers delay only the retries of a request."""
    origin = Origin(SPENT, OK, clock=clock)
    for _ in range(2):
        sync_limited(origin, "9/second", store=store, pace=False)()
    assert after(origin) == [0, 0]


def test_a_pause_of_this_process_holds_while_the_store_is_away(clock: ManualClock) -> None:
    """The transport remembers what the server said to it, with the counts of this machine."""
    store = PartlyFailing(clock=clock)
    store.failing = frozenset({"partner", "partner.held"})
    limiter = Limiter("9/second", name="partner", store=store, clock=clock)
    origin = Origin(SPENT, OK, clock=clock)
    ask = sync_limited(origin, limiter)
    ask()
    ask()
    assert after(origin) == [0, 20]


@given(st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 5_000)), min_size=1, max_size=8))
def test_the_longest_request_for_a_pause_counts(asked_ms: list[tuple[int, int]]) -> None:
    """Transports hear of pauses at different times; the store keeps the one that ends last."""
    clock = ManualClock()
    store = Limiter("1/second", clock=clock).store
    until_ns = 0
    for pause_ms, held_ms in asked_ms:
        clock.advance_ns(pause_ms * 1_000_000)
        said = (429, {"Retry-After": str(held_ms / 1_000)})
        with suppress(LimitTimeout):  # held back already: it is not sent
            ask = sync_limited(
                Origin(said, clock=clock), "9/s", store=store, attempts_max=1, wait_max=0
            )
            ask()
            until_ns = max(until_ns, clock.now_ns() + held_ms * 1_000_000)
    origin = Origin(OK, clock=clock)
    now_ns = clock.now_ns()
    sync_limited(origin, "9/second", store=store, name="outgoing")()
    assert round(origin.times[0] * SECOND) == max(until_ns, now_ns)


@pytest.mark.parametrize(("first_s", "second_s"), [(5, 5), (5, 20), (20, 5)])
def test_responses_to_requests_in_flight_hold_back_once(
    clock: ManualClock, store: Store, first_s: int, second_s: int
) -> None:
    """Two requests in flight are denied: the pause is the longer one, and not the sum."""

    def ask_meanwhile(request: httpx.Request) -> httpx.Response:
        sync_limited(Origin(denial(first_s), clock=clock), store=store, attempts_max=1)()
        clock.advance_ns(1_300_000)
        return Origin(denial(second_s), clock=clock)(request)

    def denial(seconds: int) -> tuple[int, dict[str, str]]:
        return 429, {"Retry-After": str(seconds)}

    inner = httpx.MockTransport(ask_meanwhile)
    transport = LimitTransport(
        "2/second", transport=inner, store=store, clock=clock, attempts_max=1
    )
    began_ns = clock.now_ns()
    with httpx.Client(transport=transport) as client:
        client.get(URL)
    sync_limited(Origin(OK, clock=clock), store=store)()
    until_ns = max(began_ns + first_s * SECOND, began_ns + 1_300_000 + second_s * SECOND)
    assert 0 <= clock.now_ns() - until_ns <= 1_000_000


def test_a_wrong_time_holds_back_for_an_hour_at_most(clock: ManualClock, store: Store) -> None:
    """A server that sends milliseconds as seconds does not stop its clients for ever."""
    said = (429, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1767225601000"})
    origin = Origin(said, OK, clock=clock)
    asks = [sync_limited(origin, "9/second", store=store) for _ in range(2)]
    assert asks[0]().status_code == 429
    clock.advance_ns(PAUSE_NS_MAX)
    assert [ask().status_code for ask in asks] == [200, 200]


def test_limits_from_rules(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """A rule matches the path and the method, and counts by the attribute `origin`."""
    rules = """
version: 1
rules:
  - {id: writes, match: {endpoint: "/v1/*", method: POST}, by: origin, limits: 1/second}
"""
    kind = Limiter if limited is sync_limited else AsyncLimiter
    limiter: Any = kind.from_rules(rules, clock=clock)
    origin = Origin(OK, clock=clock)
    transport: Any = LimitTransport if kind is Limiter else AsyncLimitTransport
    made = transport(limiter, transport=httpx.MockTransport(origin))

    async def ask(method: str, url: str) -> None:
        if kind is Limiter:
            made.handle_request(httpx.Request(method, url))
        else:
            await made.handle_async_request(httpx.Request(method, url))

    for method, url in [("POST", URL), ("GET", URL), ("POST", "http://b.test/v1/x"), ("POST", URL)]:
        asyncio.run(ask(method, url))
    assert after(origin) == [0, 0, 0, 1]


def test_a_limiter_of_the_caller_stays_open(clock: ManualClock) -> None:
    """Closing the transport closes the inner transport, and the limiter that it made itself."""
    with Limiter("1/hour", clock=clock) as limiter:
        transport = LimitTransport(limiter, transport=httpx.MockTransport(Origin(OK, clock=clock)))
        with httpx.Client(transport=transport) as client:
            client.get(URL)
        assert limiter.peek("http://api.test").remaining == 0
    own = LimitTransport("1/hour", on_failure="raise")
    own.close()
    with pytest.raises(StoreUnavailable):
        own.handle_request(httpx.Request("GET", URL))


def test_tests_can_switch_limits_off(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """In `limiting_off` no request waits for a limit or a limiter."""
    origin = Origin(OK, clock=clock)
    with limiting_off():
        for limits in ("1/hour", limiter_for(limited, "1/hour", clock=clock)):
            ask = limited(origin, limits)
            for _ in range(3):
                ask()
    assert after(origin) == [0] * 6


def test_a_failed_request_stays_counted(clock: ManualClock) -> None:
    """The other side may have seen it."""

    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("no")

    transport = LimitTransport("1/hour", transport=httpx.MockTransport(fail), clock=clock)
    with httpx.Client(transport=transport) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.get(URL)
        with pytest.raises(LimitTimeout):
            client.get(URL)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attempts_max": 0}, "is not a whole number from 1 to 100"),
        ({"wait_max": -1}, "not a length of time"),
        ({"store": "redsi://localhost"}, "redsi"),
        ({"on_failure": "local"}, 'on_failure=\'local\' is not "closed" or "raise": .*Limiter'),
        ({"name": 7}, "name"),
        ({"key": 7}, "a key is text"),
        ({"key": ""}, "key"),
        ({"cost": len}, r"for a cost, pass a limiter, .* LimitTransport\(Limiter"),
        ({"limits": Limiter("9/second"), "cost": 5}, "cost=5 is not a function"),
        ({"limits": "10/fortnight"}, "at character 4"),
        ({"limits": 10}, "is not a rate"),
        ({"arrives_within": "5"}, "not a length of time"),
        ({"limits": "10/second; 1000/day"}, "is not one limit of 1 to 100 .*pass a limiter"),
        ({"limits": "10/second burst 5"}, "is not one limit"),
        ({"limits": "10/second capacity 1"}, "is not one limit"),
        ({"limits": "10/second fixed_window"}, "is not one limit"),
        ({"limits": "101/second"}, "is not one limit"),
    ],
)
def test_wrong_limits_are_rejected(settings: dict[str, Any], words: str) -> None:
    """The constructor raises an error with a correct example."""
    with pytest.raises(ConfigError, match=words):
        LimitTransport(**{"limits": "10/second", **settings})


def test_a_limiter_has_its_own_settings() -> None:
    """A transport takes a limiter of its kind, and none of the settings that the limiter has."""
    for name in ("store", "name", "on_failure", "arrives_within", "clock"):
        with pytest.raises(ConfigError, match=f"^{name} does not work with a limiter"):
            LimitTransport(Limiter("1/second"), **{name: 5})  # type: ignore[arg-type]  # wrong
    with pytest.raises(ConfigError, match="LimitTransport takes a Limiter"):
        LimitTransport(AsyncLimiter("1/second"))  # type: ignore[arg-type]  # wrong
    with pytest.raises(ConfigError, match="AsyncLimitTransport an AsyncLimiter"):
        AsyncLimitTransport(Limiter("1/second"))  # type: ignore[arg-type]  # wrong


def test_an_unknown_setting_names_the_public_class() -> None:
    """A typo is a TypeError, as for any function, and names the settings."""
    for kind in (LimitTransport, AsyncLimitTransport, RetryTransport, AsyncRetryTransport):
        said = rf"^{kind.__name__}\(…\) has no option timeout; the options are .*clock, random"
        with pytest.raises(InvalidOption, match=said) as caught:
            kind(cast("Any", None), timeout=5)  # type: ignore[call-arg]  # wrong
        assert isinstance(caught.value, TypeError)
        with pytest.raises(InvalidOption, match=r"did you mean wait_max\?"):
            kind(cast("Any", None), wait_ma=5)  # type: ignore[call-arg]  # wrong


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"cost": lambda _: 3}, CapacityError),
        ({"cost": lambda _: -1}, InvalidCost),
        ({"key": lambda _: ""}, InvalidKey),
        ({"key": lambda _: Request(user="7")}, ConfigError),
        ({"limits": "2/second", "key": lambda _: Request(user="7")}, ConfigError),
    ],
)
def test_a_request_that_cannot_be_counted_is_not_sent(
    clock: ManualClock, settings: dict[str, Any], error: type[Exception]
) -> None:
    """A cost that never fits, and functions that return a wrong cost or key."""
    origin = Origin(OK, clock=clock)
    settings = {"limits": Limiter("2/second", clock=clock), **settings}
    with pytest.raises(error):
        sync_limited(origin, **settings)()
    assert origin.times == []


# --------------------------------------------------------------------- while the store is away


def test_without_the_store_the_machine_keeps_its_share_of_a_limiter(
    limited: Callable[..., Ask], clock: ManualClock
) -> None:
    """Requests are paced by the counts of this machine."""
    store = PartlyFailing(clock=clock)
    store.failing = frozenset({"partner", "partner.held"})
    settings: Any = {"store": store, "clock": clock, "local_fallback": LocalFallback(nodes=2)}
    limiter = limiter_for(limited, "2/second", name="partner", **settings)
    origin = Origin(OK, clock=clock)
    ask = limited(origin, limiter)
    for _ in range(4):
        ask()
    assert after(origin) == [0, 1, 2, 3]


def test_a_transport_waits_for_the_store(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """It asks once a second until `wait_max` has passed, sends nothing, and says why."""
    store = PartlyFailing(clock=clock)
    store.failing = frozenset({"outgoing", "outgoing.held"})
    origin = Origin(OK, clock=clock)
    ask = limited(origin, store=store, wait_max=5)
    began_ns = clock.now_ns()
    with pytest.raises(LimitTimeout, match="the store cannot decide") as caught:
        ask()
    assert caught.value.decision.degraded
    assert clock.now_ns() - began_ns == 5 * SECOND
    assert origin.times == []
    store.failing = frozenset()
    assert ask().status_code == 200


def test_on_failure_raise(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """The StoreError reaches the caller at once."""
    store = PartlyFailing(clock=clock)
    store.failing = frozenset({"outgoing", "outgoing.held"})
    ask = limited(Origin(OK, clock=clock), store=store, on_failure="raise")
    with pytest.raises(StoreUnavailable):
        ask()


# ---------------------------------------------------------------- as the other side sees it


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer: tests of concurrent waits are instant."""

    virtual_s = 0.0
    _ready: Any
    _scheduled: Any

    def time(self) -> float:
        return self.virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.virtual_s = max(self.virtual_s, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]  # asyncio's own step


class LoopClock:
    """The clock of the running loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return round(self._loop.time() * SECOND)

    def sleep(self, seconds: float) -> None:
        raise AssertionError("the event loop is blocked")

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FarOrigin:
    """A server behind a network that takes from 0 to `delay_max_s` for each direction."""

    def __init__(self, seed: int, delay_max_s: float, clock: LoopClock) -> None:
        self._random = random.Random(seed)
        self._delay_max_s = delay_max_s
        self._clock = clock
        self.sent_ns: list[int] = []
        self.arrived_ns: list[int] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.sent_ns.append(self._clock.now_ns())
        await asyncio.sleep(self._random.random() * self._delay_max_s)
        self.arrived_ns.append(self._clock.now_ns())
        await asyncio.sleep(self._random.random() * self._delay_max_s)
        if self._random.random() < 0.1:
            raise httpx.ReadTimeout("no response")
        return httpx.Response(200)


def simulate(
    limits: Any,
    *,
    leaving: bool = False,
    seed: int = 1,
    delay_max_s: float = 0.5,
    requests: int = 40,
    **settings: Any,
) -> FarOrigin:
    """Send requests from three transports that share a store, each with ten tasks.

    If `leaving`, limiters count them as they leave.
    """
    loop = VirtualLoop()
    clock = LoopClock(loop)
    origin = FarOrigin(seed, delay_max_s, clock)
    store = Limiter("1/second", clock=clock).store

    async def work(client: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            with suppress(httpx.ReadTimeout):
                await client.get(URL)

    def transport() -> AsyncLimitTransport:
        made: Any = {"store": store, "clock": clock}
        counted = limits
        if leaving:
            counted, made = AsyncLimiter(limits, **made), {}
        network = httpx.MockTransport(origin)
        made = {"wait_max": 3_600, **made, **settings}
        return AsyncLimitTransport(counted, transport=network, **made)

    async def main() -> None:
        clients = [httpx.AsyncClient(transport=transport()) for _ in range(3)]
        tasks = [work(client, -(-requests // 30)) for client in clients for _ in range(10)]
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    return origin


def most_in_a_window(times_ns: list[int], window_ns: int = SECOND) -> int:
    """Return the highest number of times in a half-open window, wherever it starts."""
    times_ns = sorted(times_ns)
    return max(
        sum(start <= each < start + window_ns for each in times_ns[first:])
        for first, start in enumerate(times_ns)
    )


LOG = Limit(10, per=1, algorithm="sliding_window_log")
# One of the seeds with which a limit on sending is exceeded on arrival.
SEED = 1


@given(
    seed=st.integers(0, 10_000),
    limit=st.integers(1, 12),
    delay_max_s=st.sampled_from([0.0, 0.01, 0.5, 3.0]),
)
def test_a_limit_is_never_exceeded_on_arrival(seed: int, limit: int, delay_max_s: float) -> None:
    """By default at most `limit` requests arrive in any second, also if responses are lost."""
    origin = simulate(f"{limit}/second", seed=seed, delay_max_s=delay_max_s)
    assert len(origin.arrived_ns) == 60
    assert most_in_a_window(origin.arrived_ns) <= limit


@pytest.mark.parametrize(
    ("limits", "leaving", "kept"),
    [
        ("10/second", True, False),
        (LOG, True, False),
        ("10/second capacity 1", True, False),
        (Limit(10, per=1.5, algorithm="sliding_window_log"), True, True),
        ("10/second", False, True),
    ],
    ids=["bucket", "log", "spaced", "log with a margin", "default"],
)
def test_arrivals_of_each_way(limits: Any, leaving: bool, kept: bool) -> None:
    """Ten that leave within a second are more on arrival, if delays of 0.5 s do not count."""
    origin = simulate(limits, leaving=leaving, seed=SEED, requests=90)
    assert (most_in_a_window(origin.arrived_ns) <= 10) == kept


def test_a_limit_uses_the_window() -> None:
    """Without delay, ten requests a second are sent: a slot is free a window after the response."""
    origin = simulate("10/second", delay_max_s=0, requests=60, arrives_within=1)
    assert most_in_a_window(origin.arrived_ns) == 10
    assert max(origin.arrived_ns) <= 8 * SECOND


def test_a_request_without_a_response_keeps_its_slot() -> None:
    """The slot is free after the window and `arrives_within`; one with a response, much earlier."""
    clock = ManualClock()
    sent: list[float] = []

    def serve(request: httpx.Request) -> httpx.Response:
        sent.append(clock.now_ns() / SECOND)
        clock.advance(2)
        if len(sent) == 1:
            raise httpx.ReadTimeout("no")
        return httpx.Response(200)

    transport = LimitTransport(
        "1/minute",
        arrives_within=30,
        wait_max=120,
        transport=httpx.MockTransport(serve),
        clock=clock,
    )
    with httpx.Client(transport=transport) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.get(URL)
        client.get(URL)
        client.get(URL)
    assert [round(each, 2) for each in sent] == [0, 90, 152]


def test_a_limiter_around_a_limit(limited: Callable[..., Ask], clock: ManualClock) -> None:
    """Each attempt passes both. If the inner transport does not send, the outer spends nothing."""
    origin = Origin((429, {}), OK, clock=clock)
    kind: Any = LimitTransport if limited is sync_limited else AsyncLimitTransport
    inner = kind(
        "1/minute",
        attempts_max=1,
        wait_max=61,
        transport=httpx.MockTransport(origin),
        clock=clock,
    )
    limiter = limiter_for(limited, "3/hour", clock=clock)
    outer = kind(limiter, transport=inner, random=lambda: 0.0)

    async def ask() -> Any:
        request = httpx.Request("GET", URL)
        if kind is LimitTransport:
            return outer.handle_request(request)
        return await outer.handle_async_request(request)

    assert asyncio.run(ask()).status_code == 200
    assert [round(each) for each in after(origin)] == [0, 60]
    inner._sender._wait_ns_max = 0
    with pytest.raises(LimitTimeout):
        asyncio.run(ask())
    with Limiter("3/hour", store=limiter.store) as same:
        assert same.peek("http://api.test").remaining == 1


def test_a_request_that_an_inner_transport_has_sent_stays_spent(clock: ManualClock) -> None:
    """Defect: the retry that found no room refunded the outer limit, which then held nothing."""
    origin = Origin((429, {"Retry-After": "0"}), clock=clock)
    settings: Any = {"wait_max": 5, "pace": False}
    network = httpx.MockTransport(origin)
    inner = LimitTransport("1/minute", transport=network, clock=clock, **settings)
    outer = LimitTransport(Limiter("2/day", clock=clock), transport=inner, **settings)
    with httpx.Client(transport=outer) as client:
        for was_sent in (True, True, False):
            with pytest.raises(LimitTimeout) as caught:
                client.get(URL)
            assert caught.value.was_sent is was_sent
            assert pickle.loads(pickle.dumps(caught.value)).was_sent is was_sent
            clock.advance(61)
    assert len(origin.times) == 2


class CancelledStore(PartlyFailing):
    """Raises CancelledError in a method of the counter of the pauses."""

    def __init__(self, method: str, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self._method = method

    def counter(self, limits: Any, rule: str, *more: Any) -> Any:
        counter = super().counter(limits, rule, *more)
        if rule.endswith(".held"):
            setattr(counter, self._method, self._cancelled)
        return counter

    def _cancelled(self, subject: str, cost: int) -> Any:
        raise asyncio.CancelledError


def test_a_response_that_is_not_returned_is_closed(
    limited: Callable[..., Ask], clock: ManualClock
) -> None:
    """A task that is cancelled after the response arrived leaves no connection behind."""
    origin = Origin(SPENT, clock=clock)
    ask = limited(origin, store=CancelledStore("check", clock))
    with pytest.raises(asyncio.CancelledError):
        ask()
    assert [body.closed for body in origin.bodies] == [True]


class Waiting(ManualClock):
    """A clock on which a wait does not end."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()

    async def sleep_async(self, seconds: float) -> None:
        self.waiting.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("counting", ["as they leave", "as they arrive"])
async def test_a_cancelled_wait_spends_nothing(counting: str) -> None:
    """A task that is cancelled while it waits leaves its turn to the next one."""
    clock = Waiting()
    settings: Any = {"transport": httpx.MockTransport(Origin(OK, clock=clock))}
    if counting == "as they leave":
        transport = AsyncLimitTransport(AsyncLimiter("1/minute", clock=clock), **settings)
    else:
        transport = AsyncLimitTransport("1/minute", clock=clock, **settings)
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get(URL)
        task = asyncio.create_task(client.get(URL))
        await clock.waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        clock.advance(61)
        assert (await client.get(URL)).status_code == 200


@pytest.mark.parametrize("leaving", [False, True])
def test_a_request_that_is_cancelled_before_it_is_sent_is_refunded(
    clock: ManualClock, leaving: bool
) -> None:
    """The units were spent, and the request did not leave."""
    store = CancelledStore("peek", clock)
    origin = Origin(OK, clock=clock)
    given: dict[str, Any] = {"limits": "1/hour", "store": store}
    if leaving:
        given = {"limits": Limiter("1/hour", name="outgoing", store=store)}
    with pytest.raises(asyncio.CancelledError):
        sync_limited(origin, **given)()
    assert sync_limited(origin, **given, pace=False)().status_code == 200


# 2026-01-01T00:00:00Z
NOW_S = 1_767_225_600
NOW_NS = NOW_S * SECOND
MOMENT = "Thu, 01 Jan 2026 00:00:07 GMT"


def seconds_of(advice: RetryAdvice) -> tuple[float, ...]:
    return tuple(each / SECOND for each in advice)


@pytest.mark.parametrize(
    ("headers", "wait_s", "spent_s"),
    [
        ({}, 0, 0),
        # Retry-After, in each of its forms
        ({"retry-after": "5"}, 5, 0),
        ({"retry-after": "0"}, 0, 0),
        ({"retry-after": " 5 "}, 5, 0),
        ({"retry-after": "1.25"}, 1.25, 0),
        ({"retry-after": "0.0000000011"}, 2e-9, 0),
        ({"retry-after": "5, 9"}, 9, 0),
        ({"retry-after": MOMENT}, 7, 0),
        ({"retry-after": "Thursday, 01-Jan-26 00:00:07 GMT"}, 7, 0),
        ({"retry-after": "Thu Jan  1 00:00:07 2026"}, 7, 0),
        ({"retry-after": "Wed, 31 Dec 2025 23:59:00 GMT"}, 0, 0),
        # other dates are relative to the server's own date
        ({"retry-after": MOMENT, "date": "Thu, 01 Jan 2026 00:00:03 GMT"}, 4, 0),
        ({"retry-after": MOMENT, "date": "garbled"}, 7, 0),
        # text that is not a time is ignored
        ({"retry-after": "soon"}, 0, 0),
        ({"retry-after": "-5"}, 0, 0),
        ({"retry-after": "٥"}, 0, 0),
        ({"retry-after": ""}, 0, 0),
        ({"retry-after": "1" * 5_000}, ADVICE_NS_MAX / SECOND, 0),
        # draft 10
        ({"ratelimit": '"orders";r=73;t=36'}, 36, 0),
        ({"ratelimit": '"orders";r=0;t=5'}, 5, 5),
        ({"ratelimit": '"a";r=0;t=5, "b";r=0;t=9, "c";r=7;t=60'}, 9, 9),
        ({"ratelimit": '"a, b\\"; r=0;t=99";r=3;t=4'}, 4, 0),
        ({"ratelimit": '"orders";r=0'}, 0, 0),
        ({"ratelimit": '"orders";r=0;pk=:cGs=:;t=5'}, 5, 5),
        # draft 7
        ({"ratelimit": "limit=100, remaining=0, reset=5"}, 5, 5),
        ({"ratelimit": "limit=100, remaining=4, reset=5"}, 5, 0),
        # draft 6
        ({"ratelimit-remaining": "0", "ratelimit-reset": "5"}, 5, 5),
        # the oldest headers: a point in time, or seconds
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(NOW_S + 8)}, 8, 8),
        ({"x-ratelimit-remaining": "3", "x-ratelimit-reset": str(NOW_S + 8)}, 8, 0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "8"}, 8, 8),
        ({"x-ratelimit-reset": str(NOW_S - 8)}, 0, 0),
        ({"x-ratelimit-remaining": "-1"}, 0, 0),
        # the standard header takes precedence over the draft, and the draft over the oldest
        ({"retry-after": "2", "ratelimit": '"a";r=0;t=5'}, 2, 5),
        ({"ratelimit": '"a";r=0;t=5', "x-ratelimit-reset": str(NOW_S + 60)}, 5, 5),
        ({"ratelimit": "garbled", "x-ratelimit-reset": str(NOW_S + 60)}, 60, 0),
    ],
)
def test_each_header_is_read(headers: dict[str, str], wait_s: float, spent_s: float) -> None:
    """Several headers have an order of precedence."""
    assert seconds_of(retry_advice_of(headers, NOW_NS)) == (wait_s, spent_s)


NAMES = ["retry-after", "date", "ratelimit", "ratelimit-remaining", "ratelimit-reset"]
NAMES += ["x-ratelimit-remaining", "x-ratelimit-reset"]
# Parts of real headers, so that random texts are similar to real ones.
PIECES = ["0", "5", "1767225700", "r=", "t=", ";", ",", '"', "\\", " ", "=", "remaining", "reset"]
PIECES += [
    "GMT",
    "Thu",
    "Jan",
    "2026",
    ":",
    "-",
    "+9999",
    "e9",
    "\x00",
    "é",
    "99999999999999999999",
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES)).map("".join))


@given(st.dictionaries(st.sampled_from(NAMES), TEXTS), st.integers(0, 2**63))
def test_any_headers_are_read(headers: dict[str, str], now_ns: int) -> None:
    """Any header gives a valid duration and no error."""
    advice = retry_advice_of(headers, now_ns)
    for found_ns in advice:
        assert 0 <= found_ns <= ADVICE_NS_MAX + SECOND


@given(
    st.decimals(0, 10**9, allow_nan=False, allow_infinity=False, places=12),
    st.dictionaries(st.sampled_from(NAMES[2:]), TEXTS),
)
def test_the_wait_is_never_less_than_requested(seconds: object, others: dict[str, str]) -> None:
    """It is at most 1 ns longer than Retry-After, for any other headers."""
    text = format(seconds, "f")
    wait_ns = retry_advice_of({**others, "retry-after": text}, NOW_NS).wait_ns
    asked_picos = int(text.replace(".", ""))
    assert asked_picos <= wait_ns * 1_000 < asked_picos + 1_000
