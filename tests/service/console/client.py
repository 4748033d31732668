"""The HTTP service with a console in this process, and a browser-like client that has logged in."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratekeeper import AsyncLimiter
from ratekeeper.control.database import Database
from ratekeeper.decide.store import Store
from ratekeeper.history.reading import Records
from ratekeeper.history.recorder import Recorder
from ratekeeper.history.sink import Sink
from ratekeeper.history.tables import Retention
from ratekeeper.rules.document.reading import read
from ratekeeper.service.console.views import COOKIE
from ratekeeper.service.http.app import HttpService
from ratekeeper.service.http.context import ServiceContext, WorkerSettings
from ratekeeper.service.http.tokens import Tokens
from ratekeeper.testing import ManualClock
from ratekeeper.web.answers import Style
from ratekeeper.web.identity import Identity
from tests.history.databases import filled
from tests.service.admin.client import RULES, secrets_of

NODE = "http://localhost"
CSRF = re.compile(r'<meta name="csrf" content="([^"]+)">')


@dataclass
class ConsoleClient:
    """A client that keeps cookies, as a browser does, and follows no redirect by itself."""

    http: httpx.AsyncClient
    context: ServiceContext
    secrets: dict[str, str]
    service: HttpService
    csrf: str = ""

    async def log_in(self, role: str = "admin") -> ConsoleClient:
        """Log in with the token of a role."""
        self.http.cookies.clear()
        answer = await self.http.post("/console/login", data={"token": self.secrets[role]})
        assert answer.status_code == 303, answer.text
        found = CSRF.search((await self.http.get("/console/audit")).text)
        assert found
        self.csrf = found[1]
        return self

    async def get(self, path: str, status: int = 200, **more: Any) -> str:
        """Return the text of a page under /console, and assert its status."""
        answer = await self.http.get(f"/console{path}", **more)
        assert answer.status_code == status, answer.text
        return answer.text

    async def post(
        self, path: str, status: int = 303, csrf: str | None = None, **fields: str
    ) -> httpx.Response:
        """Send a form of the session to a path under /console, and assert the status."""
        data = {"csrf": self.csrf if csrf is None else csrf, **fields}
        answer = await self.http.post(f"/console{path}", data=data, headers={"Origin": NODE})
        assert answer.status_code == status, answer.text
        return answer

    @property
    def cookie(self) -> str | None:
        """The cookie of the session."""
        return self.http.cookies.get(COOKIE)


@asynccontextmanager
async def console_of(
    folder: Path,
    database: str | None,
    *,
    tokens: bool = True,
    store: str | Store = "memory://",
    trusted_proxies: Sequence[str] = (),
) -> AsyncIterator[ConsoleClient]:
    """Run a service with RULES, records and a console; yield a client that has not logged in."""
    secrets = secrets_of(folder) if tokens else {}
    url = f"sqlite:///{folder / 'records.db'}"
    await filled(url)  # so that no page is read before the thread of the recorder made the tables
    records = Database(url)
    recorder = Recorder(
        lambda row_of: Sink(records.again(), Retention(), row_of=row_of),
        Records(records, "plain"),
        node="node-1",
        share=1.0,
    )
    rules = database or read(RULES)
    async with AsyncLimiter.from_rules(
        rules, poll=0.05, clock=ManualClock(), store=store
    ) as limiter:
        context = ServiceContext(
            limiter=limiter,
            tokens=Tokens.load(folder / "tokens.json" if tokens else None),
            node_id="node-1",
            node_header="07204389",
            identity=Identity({}, trusted_proxies=list(trusted_proxies)),
            settings=WorkerSettings(Style(), worker=1, sessions=folder / "sessions"),
            started_ns=time.time_ns(),
            database=database,
            recorder=recorder,
        )
        service = HttpService(context)
        await recorder.start()
        await service.start()
        try:
            transport = httpx.ASGITransport(service)  # type: ignore[arg-type]  # our own scope type
            async with httpx.AsyncClient(transport=transport, base_url=NODE) as http:
                yield ConsoleClient(http, context, secrets, service)
        finally:
            await service.stop()
            await recorder.stop()


@pytest.fixture
async def console(tmp_path: Path, template: Path) -> AsyncIterator[ConsoleClient]:
    """Yield a client of a service with rules in an SQLite file, logged in as an admin."""
    path = tmp_path / "rules.db"
    shutil.copyfile(template, path)
    async with console_of(tmp_path, f"sqlite:///{path}") as found:
        yield await found.log_in()
