"""The log of denials: a line for each rule and subject, at most one a minute."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limiter, LimitExceeded, Request
from ratekeeper.limiter.denials import SUBJECTS_MAX
from ratekeeper.testing import ManualClock, forget_counts, use_clock
from tests.failing_store import PartlyFailing

RULES = {
    "version": 1,
    "rules": [
        {"id": "keys", "by": ["api_key"], "limits": ["2/minute"], "match": {"api_key": "*"}},
        {"id": "users", "by": ["tenant", "user"], "limits": ["1/hour"], "match": {"user": "*"}},
    ],
    "deny": ["ip:192.0.2.9"],
}


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """The clock of the limiters and of the log, which begins without counts."""
    forget_counts()
    with use_clock(ManualClock(start=1_000)) as clock:
        yield clock
    forget_counts()


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ratekeeper.denied")


def denied(call: Callable[[], Any]) -> None:
    """Make a call that raises LimitExceeded."""
    with pytest.raises(LimitExceeded):
        call()


def test_a_line_has_the_denials_since_the_last_one(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The first denial is logged at once; the others of that minute are counted."""
    limiter = Limiter("5/hour", name="login")
    attempt = limiter.limit(key=lambda address: f"address:{address}")(lambda address: None)
    for _ in range(5 + 37):
        with suppress(LimitExceeded):
            attempt("203.0.113.7")
    clock.advance(60)
    denied(lambda: attempt("203.0.113.7"))
    line = 'denied rule="login" limit="5/hour" subject="address:203.0.113.7" reason=limit'
    assert caplog.messages == [f"{line} denials=1 since=0s", f"{line} denials=37 since=60s"]
    last = vars(caplog.records[-1])
    names = ("name", "levelname", "rule", "limit", "subject", "reason", "denials", "since")
    assert [last[name] for name in names] == [
        *("ratekeeper.denied", "WARNING", "login", "5/hour", "address:203.0.113.7"),
        *("limit", 37, 60),
    ]


def test_counts_of_other_subjects_follow_with_any_denial(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing runs in the background; a subject without denials since its line has no other."""
    limiter = Limiter("1/hour")
    for user in ("1", "2", "3"):
        limiter.check(f"user:{user}")
    for user in ("1", "1", "1", "2"):
        denied(limiter.reserve(f"user:{user}").__enter__)
    clock.advance(61)
    denied(limiter.reserve("user:3").__enter__)
    found = [(record.subject, record.denials, record.since) for record in caplog.records]  # type: ignore[attr-defined]  # extra
    assert found == [("user:1", 1, 0), ("user:2", 1, 0), ("user:1", 2, 61), ("user:3", 1, 0)]


def test_the_number_of_lines_is_bounded(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Further subjects are counted together, and have one line a minute."""
    limiter = Limiter("1/hour")
    for number in range(1_000):
        limiter.check(f"user:{number}")
        denied(limiter.reserve(f"user:{number}").__enter__)
    assert len(caplog.records) == SUBJECTS_MAX
    clock.advance(60)
    denied(limiter.reserve("user:999").__enter__)
    others = f'subject="(others)" reason=several denials={1_000 - SUBJECTS_MAX} since=60s'
    assert [line for line in caplog.messages if others in line] == [
        f'denied rule="" limit="" {others}'
    ]
    assert len(caplog.records) == SUBJECTS_MAX + 2


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_each_way_that_answers_a_denial_logs_it_once(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    """Decorators, `reserve` with and without a wait, and `wait`; a caller of `check` knows."""
    limiter = kind("1/hour")

    def call() -> None:
        """Do nothing."""

    async def call_async() -> None:
        """Do nothing."""

    async def each() -> None:
        for key in ("user:1", "user:2", "user:3", "user:4"):
            await result(limiter.check(key))
            assert not await result(limiter.check(key))
            assert not (await result(limiter.evaluate(key))).decision
        assert not await result(limiter.wait("user:1", timeout=1))
        for key, wait in (("user:2", 0), ("user:3", 1)):
            with pytest.raises(LimitExceeded):
                await entered(limiter.reserve(key, wait=wait))
        limited = limiter.limit(key="user:4")(call if kind is Limiter else call_async)
        with pytest.raises(LimitExceeded):
            await result(limited())

    asyncio.run(each())
    found = [(record.subject, record.denials) for record in caplog.records]  # type: ignore[attr-defined]  # extra
    assert found == [(f"user:{number}", 1) for number in (1, 2, 3, 4)]


async def result(found: Any) -> Any:
    """Return a result of either limiter."""
    return await found if hasattr(found, "__await__") else found


async def entered(context: Any) -> Any:
    """Enter the context of either limiter."""
    if hasattr(context, "__aenter__"):
        return await context.__aenter__()
    return context.__enter__()


def test_the_line_has_the_rule_that_denied(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And what that rule counts by; a deny list has no limit."""
    limiter = Limiter.from_rules(RULES)
    seen = Request(api_key="k", tenant="t1", user="7")
    with limiter.reserve(seen):
        pass
    denied(limiter.reserve(seen).__enter__)
    limiter.wait(Request(ip="192.0.2.9"), timeout=0)
    assert [line.rpartition(" denials")[0] for line in caplog.messages] == [
        'denied rule="users" limit="1/hour" subject="tenant:t1 user:7" reason=limit',
        'denied rule="(deny)" limit="" subject="ip:192.0.2.9" reason=deny_list',
    ]


def test_a_caller_of_check_can_log_a_denial(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """By limits or by rules; an allowed decision is no denial."""
    for limiter, key in (
        (Limiter("1/hour"), "user:7"),
        (Limiter.from_rules(RULES), Request(user="7")),
    ):
        for _ in range(3):
            limiter.log_denial(key, limiter.check(key))
    found = [(record.rule, record.subject) for record in caplog.records]  # type: ignore[attr-defined]  # extra
    assert found == [("", "user:7"), ("users", "tenant user:7")]


def test_a_denial_without_the_store_says_so(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has not exceeded a limit."""
    store = PartlyFailing(clock=clock)
    store.failing = frozenset({"pay"})
    limiter = Limiter("5/hour", name="pay", store=store, on_failure="closed")
    denied(limiter.reserve("user:1").__enter__)
    assert "reason=store_unavailable denials=1" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("user:42", "user:42"),
        ("ip:2001:db8::/64", "ip:2001:db8::/64"),
        ("customer:42", "customer:42"),
        ("shop.mail.send", "shop.mail.send"),
        ("sk_secret", "#"),
        ("api_key:sk_secret", "api_key:#"),
        ("customer:sk_secret", "customer:#"),
        ("header:x-api-key:sk_secret", "header:x-api-key:#"),
        (("header:x-api-key", "sk_secret"), "header:x-api-key #"),
        ("sk_secret1:and more", "#"),
        ('user:a\nb\x1b[31m"\u202e', 'user:a\\nb\\x1b[31m"\\u202e'),
        ("user:" + "a" * 400, "user:" + "a" * 95 + "…"),
    ],
)
def test_a_line_has_no_secret_and_stays_one_line(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, key: Any, shown: str
) -> None:
    """Unknown values are digests, and always the same; texts of clients are escaped and cut."""
    limiter = Limiter("1/hour")
    limiter.check(key)
    denied(limiter.reserve(key).__enter__)
    subject: str = caplog.records[0].subject  # type: ignore[attr-defined]  # extra
    assert re.sub(r"#[0-9a-f]{24}", "#", subject) == shown
    assert caplog.messages[0].isascii()
    assert caplog.messages[0].isprintable()
    assert subject.isprintable()


def test_a_client_cannot_appear_as_another_one(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that looks like the digest of another client in the log is a digest of its own."""
    limiter = Limiter("1/hour")
    shown: list[str] = []
    for name in ("sk_victim", None):
        key = f"api_key:{name or shown[0].partition(':')[2]}"
        limiter.check(key)
        denied(limiter.reserve(key).__enter__)
        shown.append(caplog.records[-1].subject)  # type: ignore[attr-defined]  # extra
    assert len(set(shown)) == 2


def test_a_denial_is_seen_without_configuration() -> None:
    """`logging` prints warnings on standard error; the last counts follow when a process exits.

    A child that was forked has none of them.
    """
    program = """
import os, sys
from ratekeeper import Limiter
limiter = Limiter("1/hour", name="login")
for _ in range(9): limiter.wait("user:7", timeout=0)
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    line = 'denied rule="login" limit="1/hour" subject="user:7" reason=limit'
    shown = [each.rpartition(" since=")[0] for each in done.stderr.splitlines()]
    assert shown == [f"{line} denials=1", f"{line} denials=7"]
