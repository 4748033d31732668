"""A node with its admin API, its tokens and a database, to ask in this process."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tollkeeper import AsyncLimiter
from tollkeeper.control.repository import Repository
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import read
from tollkeeper.service.admin.api import admin_app
from tollkeeper.service.http.tokens import Role, Tokens, create_token
from tollkeeper.testing import ManualClock

RULES = """
version: 1
tiers: {free: 5/second, pro: 50/second}
rules:
  - {id: orders, by: user, limits: 10/second, tiers: {pro: 20/second}}
  - {id: login, match: {endpoint: /login}, by: ip, limits: 3/minute}
assign: {"user:42": pro, "tenant:acme": free}
allow: ["sk_internal_*", "10.0.0.0/8"]
overrides: [{for: {user: "7"}, multiply: 2}]
"""
# What there is in each database before a test begins.
AUTHOR = "setup"


@dataclass
class AdminNode:
    """What the admin API needs of a node."""

    limiter: AsyncLimiter
    tokens: Tokens
    node_id: str = "node-1"
    started_ns: int = field(default_factory=time.time_ns)
    database: str | None = None
    recorder: Any = None


@dataclass
class Admin:
    """A node and a client that has an admin's token."""

    client: httpx.AsyncClient
    node: AdminNode
    secrets: dict[str, str]
    app: Any

    async def ask(self, method: str, path: str, status: int = 200, **more: Any) -> httpx.Response:
        """Ask under /v1/admin; whatever is not the expected status fails, with what was said."""
        answer = await self.client.request(method, f"/v1/admin{path}", **more)
        assert answer.status_code == status, answer.text
        return answer

    async def refused(self, method: str, path: str, status: int, **more: Any) -> dict[str, Any]:
        """The problem that a request is answered with; it has what every problem has."""
        answer = await self.ask(method, path, status, **more)
        assert answer.headers["content-type"] == "application/problem+json"
        found: dict[str, Any] = answer.json()
        assert found["status"] == status
        assert found["error"]["message"] == found["detail"]
        return found


def secrets_of(folder: Path) -> dict[str, str]:
    """A token of each role, in a file there."""
    roles: tuple[Role, ...] = ("admin", "read", "check")
    path = folder / "tokens.json"
    return {role: create_token(path, f"{role}-token", role) for role in roles}


@asynccontextmanager
async def admin_of(
    folder: Path,
    rules: str | Document,
    database: str | None,
    poll: float = 3600.0,
    store: str = "memory://",
) -> AsyncIterator[Admin]:
    """An admin API over a limiter with these rules, whose time stands still, and a client of it."""
    secrets = secrets_of(folder)
    clock = ManualClock()
    async with AsyncLimiter.from_rules(rules, poll=poll, clock=clock, store=store) as limiter:
        node = AdminNode(limiter, Tokens.load(folder / "tokens.json"), database=database)
        app = admin_app(node)
        headers = {"Authorization": f"Bearer {secrets['admin']}"}
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(
                transport=transport, base_url="http://node", headers=headers
            ) as client:
                yield Admin(client, node, secrets, app)
        finally:
            await app.state.plane.close()


async def filled(url: str) -> None:
    """Put RULES in a database, as version 1."""
    async with await Repository.open(url) as repository:
        await repository.apply(read(RULES), author=AUTHOR, expected=0)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with RULES; copied in a moment, where making one takes a tenth of a second."""
    path = tmp_path_factory.mktemp("admin") / "rules.db"
    asyncio.run(filled(f"sqlite:///{path}"))
    return path


@pytest.fixture
async def admin(tmp_path: Path, template: Path) -> AsyncIterator[Admin]:
    """One whose rules are in an SQLite file; its limiter has them too, and does not follow."""
    path = tmp_path / "rules.db"
    shutil.copyfile(template, path)
    async with admin_of(tmp_path, read(RULES), f"sqlite:///{path}") as found:
        yield found


@pytest.fixture
async def following(tmp_path: Path, template: Path) -> AsyncIterator[Admin]:
    """The same, but its limiter follows the file."""
    path = tmp_path / "rules.db"
    shutil.copyfile(template, path)
    url = f"sqlite:///{path}"
    async with admin_of(tmp_path, url, url, poll=0.05) as found:
        yield found


@pytest.fixture
async def from_file(tmp_path: Path) -> AsyncIterator[Admin]:
    """One whose rules are in a YAML file."""
    path = tmp_path / "limits.yaml"
    path.write_text(RULES, encoding="utf-8")
    async with admin_of(tmp_path, str(path), None) as found:
        yield found
