"""The HTTP benchmarks: the service, the middleware compared with slowapi, and Envoy, with wrk.

http check       POST /v1/check on `ratekeeper serve`, compared with minimal applications
http starlette   the middleware on Starlette, compared with Starlette alone and slowapi
http fastapi     the same on FastAPI, with the dependency
http console     POST /v1/check while the overview of the console is open
http grpc        ShouldRateLimit on `ratekeeper serve`, on grpcio and on libnghttp2, with h2load
http envoy       a real Envoy in front of a small upstream, with and without our service
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.grpc_servers import grpc_contenders
from bench.http_apps import SHARED
from bench.http_check import check_contenders
from bench.http_console import measure_console
from bench.http_envoy import measure_envoy
from bench.http_load import wrk_path
from bench.http_measure import Contender, HttpEffort, HttpWork, Progress, measure
from bench.http_report import (
    http_facts,
    http_goals,
    http_goals_table,
    http_header,
    http_json,
    work_table,
)
from bench.http_servers import get, granian
from bench.redis_placement import FREE, Placement, placements

WORKS: Final = (
    *("http check", "http console", "http starlette", "http fastapi", "http grpc", "http envoy"),
)

# (the function of http_apps, the name of its row, True if it is ours)
_STARLETTE: Final = (
    ("starlette_bare", "Starlette", False),
    ("starlette_headers", "five fixed headers, and no limit", False),
    ("starlette_ours", "ratekeeper, memory", True),
    ("starlette_ours_shared", "ratekeeper, shared", True),
    ("starlette_slowapi", "slowapi SlowAPIMiddleware", False),
    ("starlette_slowapi_asgi", "slowapi SlowAPIASGIMiddleware", False),
    ("starlette_slowapi_decorator", "slowapi @limiter.limit", False),
)
_FASTAPI: Final = (
    ("fastapi_bare", "FastAPI", False),
    ("fastapi_headers", "five fixed headers, and no limit", False),
    ("fastapi_ours", "ratekeeper, memory", True),
    ("fastapi_ours_shared", "ratekeeper, shared", True),
    ("fastapi_dependency", "a dependency that does nothing", False),
    ("fastapi_ours_dependency", "ratekeeper dependency, memory", True),
    ("fastapi_slowapi", "slowapi SlowAPIMiddleware", False),
    ("fastapi_slowapi_decorator", "slowapi @limiter.limit", False),
)


def run_http(
    wanted: Callable[[str], bool], effort: HttpEffort, progress: Progress
) -> dict[str, Any] | None:
    """Run the selected benchmarks and print results as they arrive. Return all numbers, or None."""
    names = [work for work in WORKS if wanted(work)]
    if not names:
        return None
    wrk_path()
    facts = http_facts()
    placement = placements()[0]
    print(http_header(facts, effort, placement), flush=True)
    works = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ratekeeper-bench-") as folder:
            work = _measured(name, Path(folder), placement, effort, progress)
        progress("")
        print(work_table(work), flush=True)
        works.append(work)
    goals = http_goals(works)
    if goals:
        print(http_goals_table(goals), flush=True)
    return http_json(works, goals, facts, effort)


def _measured(
    name: str, folder: Path, placement: Placement, effort: HttpEffort, progress: Progress
) -> HttpWork:
    if name == "http envoy":
        # Four programs share the processors, and no placement is right, so none is pinned.
        return measure_envoy(name, folder, FREE, effort, progress)
    if name == "http check":
        return measure(name, check_contenders(folder), placement, effort, progress)
    if name == "http console":
        return measure_console(name, folder, placement, effort, progress)
    if name == "http grpc":
        return measure(name, grpc_contenders(folder), placement, effort, progress)
    apps = _STARLETTE if name == "http starlette" else _FASTAPI
    return measure(name, _contenders(apps, folder), placement, effort, progress)


def _contenders(apps: Sequence[tuple[str, str, bool]], folder: Path) -> list[Contender]:
    return [
        Contender(
            row,
            granian(f"bench.http_apps:{made_by}", factory=True),
            [get("/")],
            ours=ours,
            timed=ours or number == 0,
            environment={SHARED: str(folder / made_by)},
        )
        for number, (made_by, row, ours) in enumerate(apps)
    ]
