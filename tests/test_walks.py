"""The walks of docs/architecture.md that need no server: a check in memory, and FastAPI."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from fastapi import FastAPI

from ratekeeper import Limiter, Request
from ratekeeper.fastapi import RateLimit
from tests.walks import SOURCE, Walk, documented, recorded, resolved, section, walk_of

IN_MEMORY = "Follow a request: Limiter.check in memory"
RULES_IN_MEMORY = "Follow a request: two rules in memory"
FASTAPI = "Follow a request: the FastAPI middleware"
RULES = """
version: 1
rules:
  - {id: orders, match: {endpoint: "/v1/*"}, by: user, limits: 100/minute}
  - {id: tenants, by: tenant, limits: 1000/minute}
"""


def walk_of_a_check() -> Walk:
    """Record a check whose key the kernel does not take itself."""
    limiter = Limiter("100/minute", by=["user"])
    requests = [Request(user=str(number)) for number in range(2)]
    limiter.check(requests[0])
    with recorded() as walk:
        limiter.check(requests[1])
    return walk


def walk_of_rules(document: str) -> Walk:
    """Record a check by rules whose shape is known."""
    limiter = Limiter.from_rules(document, follow=False)
    requests = [Request(user=str(number), tenant="t", endpoint="/v1/a") for number in range(2)]
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


@pytest.mark.parametrize("count", [1, 2])
def test_the_document_follows_a_check_by_rules(count: int) -> None:
    """One rule or two: the functions of the section, in that order, and then the kernel."""
    named = documented(RULES_IN_MEMORY)
    document = "\n".join(RULES.splitlines()[: 3 + count])
    assert named == walk_of_rules(document).steps


@pytest.mark.parametrize("heading", [IN_MEMORY, RULES_IN_MEMORY])
def test_the_c_functions_of_the_section_exist(heading: str) -> None:
    """Each is defined in the file that the section names."""
    named = re.findall(r"`(\w+\.c)` `(\w+)`", section(heading))
    assert named
    for file, function in named:
        source = (SOURCE / "decide/kernel" / file).read_text(encoding="utf-8")
        assert re.search(rf"^[^\n;]*\b{function}\([^;]*?\)\s*\{{", source, re.MULTILINE), function


async def test_the_document_follows_a_request_through_fastapi() -> None:
    """The functions of the section exist and are called in that order, and no others."""
    named = documented(FASTAPI)
    assert all(resolved(*step.split(":")) or "<locals>" in step for step in named)
    assert named == (await walk_through_fastapi()).steps


def print_walks() -> None:
    """Print the rows of the tables in docs/architecture.md."""
    for walk in (walk_of_a_check(), walk_of_rules(RULES), asyncio.run(walk_through_fastapi())):
        for step in walk.steps:
            print(f"| `{step}` | |")
        print()


if __name__ == "__main__":
    print_walks()
