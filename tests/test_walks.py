"""The walks of docs/architecture.md that need no server: a check in memory, and FastAPI."""

from __future__ import annotations

import asyncio
import re
from weakref import WeakSet

import httpx
import pytest
from fastapi import FastAPI

from ratekeeper import Limiter, Request, asgi
from ratekeeper.fastapi import RateLimit
from tests.walks import SOURCE, Walk, documented, recorded, resolved, section, walk_of

IN_MEMORY = "Follow a request: Limiter.check in memory"
FASTAPI = "Follow a request: the FastAPI middleware"


def walk_of_a_check() -> Walk:
    """Record a check whose key the kernel does not take itself."""
    limiter = Limiter("100/minute", by=["user"])
    requests = [Request(user=str(number)) for number in range(2)]
    limiter.check(requests[0])
    with recorded() as walk:
        limiter.check(requests[1])
    return walk


async def walk_through_fastapi() -> Walk:
    """Record a request to a route with a limit, from a client that came before."""
    app = FastAPI()
    limit = RateLimit(app, "100/minute")

    @app.get("/search", dependencies=[limit("50/second")])
    async def search() -> None:
        """Answer."""

    transport = httpx.ASGITransport(app, client=("203.0.113.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:

        async def call(_: int) -> None:
            assert (await client.get("/search")).status_code == 200

        return await walk_of(call)


def test_the_document_follows_a_check_in_memory() -> None:
    """The functions of the section exist and are called in that order, and no others."""
    named = documented(IN_MEMORY)
    assert all(resolved(*step.split(":")) for step in named)
    assert named == walk_of_a_check().steps


def test_a_plain_key_crosses_no_python() -> None:
    """For a string and the system clock, `limiter.check` is the kernel's own function."""
    limiter = Limiter("100/minute")
    with recorded() as walk:
        limiter.check("user:42")
    assert walk.steps == []


def test_the_c_functions_of_the_section_exist() -> None:
    """Each is defined in the file that the section names."""
    named = re.findall(r"`(\w+\.c)` `(\w+)`", section(IN_MEMORY))
    assert named
    for file, function in named:
        source = (SOURCE / "decide/kernel" / file).read_text(encoding="utf-8")
        assert re.search(rf"^[^\n;]*\b{function}\([^;]*?\)\s*\{{", source, re.MULTILINE), function


async def test_the_document_follows_a_request_through_fastapi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The functions of the section exist and are called in that order, and no others."""
    # An endpoint of another test may replace the limits of applications; then each looks for it.
    monkeypatch.setattr(asgi, "_overriding", WeakSet())
    named = documented(FASTAPI)
    assert all(resolved(*step.split(":")) or "<locals>" in step for step in named)
    assert named == (await walk_through_fastapi()).steps


def print_walks() -> None:
    """Print the rows of the tables in docs/architecture.md."""
    for walk in (walk_of_a_check(), asyncio.run(walk_through_fastapi())):
        for step in walk.steps:
            print(f"| `{step}` | |")
        print()


if __name__ == "__main__":
    print_walks()
