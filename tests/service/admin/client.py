"""The admin API in this process, with tokens and a database, and a client that calls it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from ratekeeper import AsyncLimiter
from ratekeeper.control.repository import Repository
from ratekeeper.decide.store import Store
from ratekeeper.metrics.counters import LimiterMetrics, MetricsSnapshot
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import read
from ratekeeper.service.admin.api import admin_app
from ratekeeper.service.admin.control import control_plane
from ratekeeper.service.http.activity import ActivityHistory
from ratekeeper.service.http.envoys import EnvoyDirectory
from ratekeeper.service.http.incoming import IncomingBodies
from ratekeeper.service.http.loads import SharedLoads
from ratekeeper.service.http.tokens import Role, Tokens, create_token
from ratekeeper.testing import ManualClock
from ratekeeper.web.identity import Identity

RULES = """
version: 1
tiers: {free: 5/second, pro: 50/second}
rules:
  - {id: orders, by: user, limits: 10/second, tiers: {pro: 20/second}}
  - {id: login, match: {endpoint: /login}, by: ip, limits: 3/minute}
assign: {"user:42": pro, "tenant:acme": free}
allow: ["api_key:sk_internal_*", "10.0.0.0/8"]
overrides: [{for: {user: "7"}, multiply: 2}]
"""
# The author of the first version in each database.
AUTHOR = "setup"


@dataclass
class FakeContext:
    """As much of a worker as the admin API needs."""

    limiter: AsyncLimiter
    tokens: Tokens
    node_id: str = "node-1"
    node_header: str = "07204389"
    started_ns: int = field(default_factory=time.time_ns)
    database: str | None = None
    recorder: Any = None
    control: Any = None
    loads: SharedLoads = field(init=False)
    envoys: EnvoyDirectory = field(init=False)
    identity: Identity = field(default_factory=lambda: Identity({}))
    totals: Callable[[], MetricsSnapshot] = field(init=False)
    activity: ActivityHistory = field(init=False)
    store_name: str = "memory://"
    bodies: IncomingBodies = field(default_factory=IncomingBodies)

    def __post_init__(self) -> None:
        self.totals = LimiterMetrics(self.limiter).snapshot
        self.activity = ActivityHistory(None)
        self.activity.totals = self.totals
        self.loads = SharedLoads(self.limiter, None)
        self.envoys = EnvoyDirectory(self.limiter)


@dataclass
class Admin:
    """An admin API and a client with an admin's token."""

    client: httpx.AsyncClient
    context: FakeContext
    secrets: dict[str, str]
    app: Any

    async def call(self, method: str, path: str, status: int = 200, **more: Any) -> httpx.Response:
        """Call an operation under /v1/admin, and assert its status."""
        answer = await self.client.request(method, f"/v1/admin{path}", **more)
        assert answer.status_code == status, answer.text
        return answer

    async def rejected(self, method: str, path: str, status: int, **more: Any) -> dict[str, Any]:
        """Call an operation that is rejected, and return the problem."""
        answer = await self.call(method, path, status, **more)
        assert answer.headers["content-type"] == "application/problem+json"
        found: dict[str, Any] = answer.json()
        assert found["status"] == status
        assert found["error"]["message"] == found["detail"]
        return found


def secrets_of(folder: Path) -> dict[str, str]:
    """Make a token file with a token of each role; return the secrets."""
    text, secrets = _token_file()
    path = folder / "tokens.json"
    path.touch(mode=0o600)
    path.write_text(text)
    return dict(secrets)


@cache
def _token_file() -> tuple[str, dict[str, str]]:
    """Make the tokens once: each is written to the disk before `create_token` returns."""
    roles: tuple[Role, ...] = ("admin", "read", "check")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.json"
        secrets = {role: create_token(path, f"{role}-token", role) for role in roles}
        return path.read_text(), secrets


# Applications that no test uses at the moment. FastAPI prepares the operations of a new one at its
# first request, which takes longer than most tests.
_UNUSED: list[Any] = []


@contextmanager
def _app_of(context: FakeContext) -> Iterator[Any]:
    """Yield an application of this context."""
    if _UNUSED:
        app = _UNUSED.pop()
        app.state.control = control_plane(context)
    else:
        app = admin_app(context)
    yield app
    _UNUSED.append(app)


@asynccontextmanager
async def admin_of(
    folder: Path,
    rules: str | Document,
    database: str | None,
    poll: float = 3600.0,
    store: str | Store = "memory://",
) -> AsyncIterator[Admin]:
    """Run the admin API of a limiter with these rules and a manual clock; yield a client."""
    secrets = secrets_of(folder)
    clock = ManualClock()
    async with AsyncLimiter.from_rules(rules, poll=poll, clock=clock, store=store) as limiter:
        context = FakeContext(limiter, Tokens.load(folder / "tokens.json"), database=database)
        headers = {"Authorization": f"Bearer {secrets['admin']}"}
        with _app_of(context) as app:
            transport = httpx.ASGITransport(app)
            try:
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://node", headers=headers
                ) as client:
                    yield Admin(client, context, secrets, app)
            finally:
                await app.state.control.close()


async def filled(url: str) -> None:
    """Apply RULES to a database as version 1."""
    async with await Repository.open(url) as repository:
        await repository.apply(read(RULES), author=AUTHOR, expected=0)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an SQLite file with RULES. A copy is faster than a new file, which takes 0.1 s."""
    path = tmp_path_factory.mktemp("admin") / "rules.db"
    asyncio.run(filled(f"sqlite:///{path}"))
    return path


@pytest.fixture
async def admin(tmp_path: Path, template: Path) -> AsyncIterator[Admin]:
    """Yield one with rules in an SQLite file; its limiter has a copy and does not follow it."""
    path = tmp_path / "rules.db"
    shutil.copyfile(template, path)
    async with admin_of(tmp_path, read(RULES), f"sqlite:///{path}") as found:
        yield found


@pytest.fixture
async def following(tmp_path: Path, template: Path) -> AsyncIterator[Admin]:
    """Yield one whose limiter follows the SQLite file."""
    path = tmp_path / "rules.db"
    shutil.copyfile(template, path)
    url = f"sqlite:///{path}"
    async with admin_of(tmp_path, url, url, poll=0.05) as found:
        yield found


@pytest.fixture
async def from_file(tmp_path: Path) -> AsyncIterator[Admin]:
    """Yield one with rules in a YAML file."""
    path = tmp_path / "limits.yaml"
    path.write_text(RULES, encoding="utf-8")
    async with admin_of(tmp_path, str(path), None) as found:
        yield found
