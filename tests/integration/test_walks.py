"""The walk of `POST /v1/check` with rules on Redis, as docs/architecture.md tells it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from ratekeeper import AsyncLimiter, Limiter, Request, open_store
from ratekeeper.service.http.context import ServiceContext, WorkerSettings
from ratekeeper.service.http.tokens import Tokens
from ratekeeper.testing import ManualClock
from ratekeeper.web.answers import Style
from ratekeeper.web.identity import Identity
from tests.redis_servers import running
from tests.service.http.client import HttpClient
from tests.walks import (
    Walk,
    coroutine_folders,
    documented,
    files,
    folders,
    recorded,
    resolved,
    walk_of,
)

LEASED = "Follow a request: a leased check on Redis"
REPEATED = "Follow a request: POST /v1/check with rules on Redis"
FUNCTIONS_MAX = 32
FILES_MAX = 15
TWO_RULES_MAX = 40

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "orders", "match": {"endpoint": "/orders"}, "by": ["user"], "limits": ["99/minute"]}
    ],
}


async def walk_of_a_check(store: str, *, repeated: bool) -> Walk:
    """Record a check by one rule, with a body that came before or with a new one."""
    # A busy machine must not lead a check past its deadline.
    opened: Any = open_store(store, deadline_ms=10_000, connect_ms=10_000)
    async with AsyncLimiter.from_rules(RULES, store=opened) as limiter:
        context = ServiceContext(
            limiter=limiter,
            tokens=Tokens.load(None),
            node_id="walk",
            node_header="walk",
            identity=Identity(),
            settings=WorkerSettings(Style()),
            started_ns=time.time_ns(),
        )
        http = HttpClient(context, ManualClock())

        async def check(number: int) -> None:
            # A user whose bucket no other test has put into the cache of buckets.
            user = "42" if repeated else f"{time.time_ns()}-{number}"
            body = {"user": user, "endpoint": "/orders"}
            assert (await http("POST", "/v1/check", body)).status == 200

        if repeated:
            await check(0)
            await check(0)
        walk = await walk_of(check)
    await opened.aclose()
    return walk


async def test_the_document_follows_a_check_on_redis() -> None:
    """The functions named there are called in that order, and no others; the bounds hold.

    Folders whose functions are awaited stay open until the reply; every other folder is entered
    once.
    """
    store = running("single").uri
    repeated = (await walk_of_a_check(store, repeated=True)).steps
    first = (await walk_of_a_check(store, repeated=False)).steps
    more = [step for step in first if step not in repeated]
    named = documented(REPEATED)
    assert all(resolved(*step.split(":")) or "<locals>" in step for step in named)
    assert named == repeated + more
    assert len(repeated) <= FUNCTIONS_MAX
    assert len(files(repeated)) <= FILES_MAX
    again = {folder for folder, runs in Counter(folders(repeated)).items() if runs > 1}
    assert again <= coroutine_folders(repeated)


def test_a_check_with_two_rules_crosses_few_functions() -> None:
    """In a thread. Both rules are decided in one call."""
    rules = {
        **RULES,
        "rules": [*RULES["rules"], {"id": "all", "by": ["ip"], "limits": ["9/second"]}],
    }
    opened: Any = open_store(running("single").uri, deadline_ms=10_000, connect_ms=10_000)
    walks: list[list[str]] = []
    with Limiter.from_rules(rules, store=opened) as limiter:
        for number in range(10):
            request = Request(user="42", ip=f"192.0.2.{number}", endpoint="/orders")
            limiter.check(request)
            with recorded() as walk:
                assert limiter.check(request).allowed
            walks.append(walk.steps)
    opened.close()
    assert min(map(len, walks)) <= TWO_RULES_MAX


def walk_of_a_lease(store: str) -> tuple[Walk, Walk]:
    """Record the check that takes a lease, and one that spends it."""
    opened: Any = open_store(store, deadline_ms=10_000, connect_ms=10_000)
    walks: list[tuple[Walk, Walk]] = []
    with Limiter("100000/hour", store=opened, consistency="leased") as limiter:
        for number in range(10):
            limiter.check(f"user:{number}")
            with recorded() as taking:
                assert limiter.check(f"user:{number}").allowed
            with recorded() as spending:
                assert limiter.check(f"user:{number}").allowed
            walks.append((taking, spending))
    opened.close()
    return min(walks, key=lambda pair: sum(len(walk.steps) for walk in pair))


def test_the_document_follows_a_leased_check() -> None:
    """The functions named there are called in that order, and no others; a lease has no Python."""
    taking, spending = walk_of_a_lease(running("single").uri)
    named = documented(LEASED)
    assert all(resolved(*step.split(":")) for step in named)
    assert named == taking.steps
    assert spending.steps == []


def print_walk() -> None:
    """Print the rows of the tables in docs/architecture.md."""
    store = running("single").uri
    repeated = asyncio.run(walk_of_a_check(store, repeated=True)).steps
    first = asyncio.run(walk_of_a_check(store, repeated=False)).steps
    for steps in (repeated, [step for step in first if step not in repeated]):
        for step in steps:
            print(f"| `{step}` | |")
        print(len(steps), len(files(steps)))
    print(len(first), len(files(first)))


if __name__ == "__main__":
    print_walk()
