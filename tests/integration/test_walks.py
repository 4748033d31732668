"""The walk of `POST /v1/check` with rules on Redis, as docs/architecture.md tells it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.redis_servers import running
from tests.service.http.client import HttpClient
from tests.walks import Walk, documented, files, folders, resolved, walk_of
from tollkeeper import AsyncLimiter
from tollkeeper.control.database import Database
from tollkeeper.history.reading import Records
from tollkeeper.history.recorder import Recorder
from tollkeeper.history.sink import Sink
from tollkeeper.service.http.context import ServiceContext, WorkerSettings
from tollkeeper.service.http.tokens import Tokens, create_token
from tollkeeper.testing import ManualClock
from tollkeeper.web.answers import Style
from tollkeeper.web.identity import Identity

HEADING = "Follow a request: POST /v1/check with rules on Redis"
FUNCTIONS_MAX = 43
FILES_MAX = 21
# Runs of functions in one folder; as many as there are folders if the walk never returns to one.
RUNS_MAX = 18

RULES = {
    "version": 1,
    "rules": [
        {"id": "orders", "match": {"endpoint": "/orders"}, "by": ["user"], "limits": ["9/minute"]}
    ],
}


async def walk_of_a_check(store: str, folder: Path) -> Walk:
    """Record a check with a token, by one rule, with records on."""
    secret = create_token(folder / "tokens.json", "checkout", "check")
    headers = {"Authorization": f"Bearer {secret}"}
    database = Database(f"sqlite:///{folder / 'records.db'}")
    recorder = Recorder(
        lambda row_of: Sink(database.again(), row_of=row_of),
        Records(database, "plain"),
        node="walk",
    )
    async with AsyncLimiter.from_rules(RULES, store=store) as limiter:
        context = ServiceContext(
            limiter=limiter,
            tokens=Tokens.load(folder / "tokens.json"),
            node_id="walk",
            identity=Identity(),
            settings=WorkerSettings(Style()),
            started_ns=time.time_ns(),
            recorder=recorder,
        )
        http = HttpClient(context, ManualClock())

        async def check(user: int) -> None:
            body = {"user": str(user), "endpoint": "/orders"}
            assert (await http("POST", "/v1/check", body, headers)).status == 200

        return await walk_of(check)


async def test_the_document_follows_a_check_on_redis(tmp_path: Path) -> None:
    """The functions named there are called in that order, and no others; the bounds hold."""
    steps = (await walk_of_a_check(running("single").uri, tmp_path)).steps
    named = documented(HEADING)
    assert all(resolved(*step.split(":")) or "<locals>" in step for step in named)
    assert named == steps
    assert len(steps) <= FUNCTIONS_MAX
    assert len(files(steps)) <= FILES_MAX
    assert len(folders(steps)) <= RUNS_MAX


def print_walk() -> None:
    """Print the rows of the table in docs/architecture.md."""
    with TemporaryDirectory() as folder:
        walk = asyncio.run(walk_of_a_check(running("single").uri, Path(folder)))
    for step in walk.steps:
        print(f"| `{step}` | |")


if __name__ == "__main__":
    print_walk()
