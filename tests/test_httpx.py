"""HTTP clients wait as long as servers request, pace themselves, and keep a retry budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import ConfigError
from tollkeeper.httpx import (
    ADVICE_NS_MAX,
    DRAIN_BYTES_MAX,
    ORIGINS_MAX,
    AsyncRetryTransport,
    Budget,
    RetryAdvice,
    RetryTransport,
    retry_advice_of,
)
from tollkeeper.testing import ManualClock

SECOND = 1_000_000_000
MANY = Budget(reserve=1_000)
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


@pytest.mark.parametrize(
    ("headers", "waited_s"),
    [
        ({"Retry-After": "5"}, 5),
        ({"Retry-After": "Thu, 01 Jan 2026 00:00:07 GMT"}, 7),
        ({"RateLimit": '"default";r=0;t=5'}, 5),
        ({"RateLimit": "limit=10, remaining=0, reset=5"}, 5),
        ({"X-RateLimit-Reset": "1767225608"}, 8),
        ({"Retry-After": "2", "RateLimit": '"default";r=0;t=2'}, 2),
    ],
)
def test_the_wait_is_as_long_as_the_response_requests(
    asking: Callable[..., Ask], clock: ManualClock, headers: dict[str, str], waited_s: float
) -> None:
    """Without a random part it is exact, and then the request passes."""
    origin = Origin((429, headers), (200, {}), clock=clock)
    assert asking(origin)().status_code == 200
    assert after(origin) == [0, waited_s]


def test_without_advice_the_spread_doubles(asking: Callable[..., Ask], clock: ManualClock) -> None:
    """Waits are at most 0.5 s, 1 s, 2 s, 4 s after the first, second, … attempt."""
    origin = Origin((429, {}), clock=clock)
    assert asking(origin, random=lambda: 1.0)().status_code == 429
    assert after(origin) == [0, 0.5, 1.5, 3.5, 7.5]


@pytest.mark.parametrize(
    ("random", "waited_s"), [(0.0, 40.0), (0.5, 45.0), (1.0, 50.0)], ids=["none", "half", "all"]
)
def test_the_random_time_is_added(clock: ManualClock, random: float, waited_s: float) -> None:
    """A long wait is extended by up to a quarter of itself."""
    origin = Origin((429, {"Retry-After": "40"}), (200, {}), clock=clock)
    assert sync_ask(origin, random=lambda: random)().status_code == 200
    assert after(origin) == [0, waited_s]


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
        (429, "PATCH", 3),
        (503, "GET", 3),
        (503, "PUT", 3),
        (503, "DELETE", 3),
        (503, "POST", 1),
        (503, "PATCH", 1),
        (500, "GET", 1),
        (502, "GET", 1),
        (403, "GET", 1),
        (200, "GET", 1),
    ],
)
def test_which_requests_are_repeated(
    asking: Callable[..., Ask], clock: ManualClock, status: int, method: str, attempts: int
) -> None:
    """A 429 is repeated with any method, a 503 with idempotent methods, and nothing else."""
    origin = Origin((status, {}), clock=clock)
    assert asking(origin, attempts_max=3)(method).status_code == status
    assert len(origin.times) == attempts


def test_statuses_are_configurable(clock: ManualClock) -> None:
    """For example 502 is repeated and 429 is not."""
    origin = Origin((502, {}), (429, {}), clock=clock)
    assert sync_ask(origin, statuses={502: "any"})("POST").status_code == 429
    assert len(origin.times) == 2


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
    budget = Budget(share=0.1, per_second=0, reserve=5)
    ask = sync_ask(origin, budget=budget)
    for _ in range(100):
        assert ask().status_code == 503
    # The first request adds nothing, because the reserve is full.
    assert 100 + 5 + 9 <= len(origin.times) <= 100 + 5 + 10


def test_the_budget_grows_with_time(clock: ManualClock) -> None:
    """It grows by one retry a second, up to the reserve."""
    origin = Origin((503, {}), clock=clock)
    ask = sync_ask(origin, budget=Budget(share=0, per_second=1, reserve=2))
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
    ask = sync_ask(origin, budget=Budget(share=0, per_second=0, reserve=1))
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
        ("origin", URL, [0, 5]),
        ("origin", "http://api.test/other", [0, 5]),
        ("origin", "http://api.test:8080/v1/orders", [0, 0]),
        ("origin", "https://api.test/v1/orders", [0, 0]),
        ("path", URL + "?page=2", [0, 5]),
        ("path", "http://api.test/other", [0, 0]),
        ("off", URL, [0, 0]),
    ],
)
def test_pace_selects_the_requests_that_wait(
    clock: ManualClock, pace: str, url: str, times: list[float]
) -> None:
    """Requests to the same origin wait, or those to the same path, or none."""
    origin = Origin((200, {"RateLimit": '"default";r=0;t=5'}), (200, {}), clock=clock)
    ask = sync_ask(origin, pace=pace)
    ask()
    ask(url=url)
    assert after(origin) == times


@pytest.mark.parametrize(
    ("headers", "times"),
    [
        ({"RateLimit": '"default";r=9;t=5'}, [0, 0, 0]),
        ({"RateLimit": '"default";r=0;t=2'}, [0, 0, 2]),
        ({}, [0, 0, 5]),
    ],
    ids=["some left", "less to wait", "nothing said"],
)
def test_the_newest_response_sets_the_pace(
    clock: ManualClock, headers: dict[str, str], times: list[float]
) -> None:
    """This includes the response to a request that was already in flight."""

    def ask_meanwhile(request: httpx.Request) -> httpx.Response:
        answer = origin(request)
        if len(origin.times) == 1:
            client.get(URL)  # sent and answered before the first response is read
        return answer

    spent = (200, {"RateLimit": '"default";r=0;t=5'})
    origin = Origin((200, headers), spent, (200, {}), clock=clock)
    transport = RetryTransport(httpx.MockTransport(ask_meanwhile), clock=clock, random=lambda: 0.0)
    client = httpx.Client(transport=transport)
    client.get(URL)
    client.get(URL)
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


def test_the_number_of_origins_is_bounded(clock: ManualClock) -> None:
    """The most recently used ones are kept."""
    origin = Origin((200, {"RateLimit": '"default";r=0;t=5'}), clock=clock)
    transport = RetryTransport(httpx.MockTransport(origin), clock=clock, random=lambda: 0.0)
    with httpx.Client(transport=transport) as client:
        for number in range(ORIGINS_MAX + 10):
            client.get(f"http://host{number}.test")
        places = transport._retries.origins
        assert len(places._known) == ORIGINS_MAX
        assert ("http", f"host{ORIGINS_MAX + 9}.test", None) in places._known


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
        ({"attempts_max": 0}, "between 1 and 100"),
        ({"attempts_max": 2.5}, "not a whole number"),
        ({"wait_max": -1}, "not a length of time"),
        ({"wait_max": "1m"}, "not a length of time"),
        ({"pace": "host"}, '"origin", "path" or "off"'),
        ({"statuses": {429: "GET"}}, "any"),
        ({"clock": 5}, "now_ns"),
    ],
)
def test_wrong_settings_are_rejected(settings: dict[str, Any], words: str) -> None:
    """The constructor raises an error with a correct example."""
    for transport in (RetryTransport, AsyncRetryTransport):
        with pytest.raises(ConfigError, match=words):
            transport(httpx.MockTransport(lambda _: httpx.Response(200)), **settings)


@pytest.mark.parametrize("values", [{"share": -1}, {"reserve": "5"}, {"per_second": True}])
def test_wrong_budgets_are_rejected(values: dict[str, Any]) -> None:
    """A share, a rate and a reserve are numbers from 0 up."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        Budget(**values)


SECOND = 1_000_000_000
# 2026-01-01T00:00:00Z
NOW_S = 1_767_225_600
NOW_NS = NOW_S * SECOND
MOMENT = "Thu, 01 Jan 2026 00:00:07 GMT"


def seconds_of(advice: RetryAdvice) -> tuple[float | None, ...]:
    return tuple(None if each is None else each / SECOND for each in advice)


@pytest.mark.parametrize(
    ("headers", "wait_s", "spent_s"),
    [
        ({}, None, None),
        # Retry-After, in each of its forms
        ({"retry-after": "5"}, 5, None),
        ({"retry-after": "0"}, 0, None),
        ({"retry-after": " 5 "}, 5, None),
        ({"retry-after": "1.25"}, 1.25, None),
        ({"retry-after": "1."}, 1, None),
        ({"retry-after": "5, 9"}, 9, None),
        ({"retry-after": MOMENT}, 7, None),
        ({"retry-after": "Thursday, 01-Jan-26 00:00:07 GMT"}, 7, None),
        ({"retry-after": "Thu Jan  1 00:00:07 2026"}, 7, None),
        ({"retry-after": "Wed, 31 Dec 2025 23:59:00 GMT"}, 0, None),
        # other dates are relative to the server's own date
        ({"retry-after": MOMENT, "date": "Thu, 01 Jan 2026 00:00:03 GMT"}, 4, None),
        ({"retry-after": MOMENT, "date": "garbled"}, 7, None),
        # text that is not a time is ignored
        ({"retry-after": "soon"}, None, None),
        ({"retry-after": "-5"}, None, None),
        ({"retry-after": "٥"}, None, None),
        ({"retry-after": ""}, None, None),
        ({"retry-after": "1" * 5_000}, ADVICE_NS_MAX / SECOND, None),
        # draft 10
        ({"ratelimit": '"orders";r=73;t=36'}, 36, 0),
        ({"ratelimit": '"orders";r=0;t=5'}, 5, 5),
        ({"ratelimit": '"a";r=0;t=5, "b";r=0;t=9, "c";r=7;t=60'}, 9, 9),
        ({"ratelimit": '"a, b\\"; r=0;t=99";r=3;t=4'}, 4, 0),
        ({"ratelimit": '"orders";r=0'}, None, None),
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
        ({"x-ratelimit-reset": str(NOW_S - 8)}, 0, None),
        ({"x-ratelimit-remaining": "-1"}, None, None),
        # the standard header takes precedence over the draft, and the draft over the oldest
        ({"retry-after": "2", "ratelimit": '"a";r=0;t=5'}, 2, 5),
        ({"ratelimit": '"a";r=0;t=5', "x-ratelimit-reset": str(NOW_S + 60)}, 5, 5),
        ({"ratelimit": "garbled", "x-ratelimit-reset": str(NOW_S + 60)}, 60, None),
    ],
)
def test_each_header_is_read(
    headers: dict[str, str], wait_s: float | None, spent_s: float | None
) -> None:
    """Several headers have an order of precedence."""
    assert seconds_of(retry_advice_of(headers, NOW_NS)) == (wait_s, spent_s)


def test_fractions_round_up() -> None:
    """A wait of slightly more than a nanosecond is two nanoseconds."""
    assert retry_advice_of({"retry-after": "0.0000000011"}, NOW_NS).wait_ns == 2
    assert retry_advice_of({"retry-after": "0.0000000010"}, NOW_NS).wait_ns == 1


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
        assert found_ns is None or 0 <= found_ns <= ADVICE_NS_MAX + SECOND


@given(
    st.decimals(0, 10**9, allow_nan=False, allow_infinity=False, places=12),
    st.dictionaries(st.sampled_from(NAMES[2:]), TEXTS),
)
def test_the_wait_is_never_less_than_requested(seconds: object, others: dict[str, str]) -> None:
    """It is at most 1 ns longer than Retry-After, for any other headers."""
    text = format(seconds, "f")
    wait_ns = retry_advice_of({**others, "retry-after": text}, NOW_NS).wait_ns
    assert wait_ns is not None
    asked_picos = int(text.replace(".", ""))
    assert asked_picos <= wait_ns * 1_000 < asked_picos + 1_000


@given(st.integers(0, 10**9), st.integers(-(10**6), 10**6))
def test_a_date_is_relative_to_the_servers_clock(after_s: int, skew_s: int) -> None:
    """The client's own clock does not matter."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    headers = {
        "date": format_datetime(start, usegmt=True),
        "retry-after": format_datetime(start + timedelta(seconds=after_s), usegmt=True),
    }
    assert retry_advice_of(headers, NOW_NS + skew_s * SECOND).wait_ns == after_s * SECOND
