"""Our storages for `limits` beside its own, through its strategies: the work "limits storage".

Each check is `hit()` and `get_window_stats()`, as Flask-Limiter makes it to answer with headers.
The rows "hit() alone" leave the second call out. Ratios refer to our storage in the first row of a
table: in process the memory, on Redis the same server. The Redis server has no other clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from limits import RateLimitItemPerSecond, strategies
from limits.storage import storage_from_string
from tests.redis_servers import Single

import ratekeeper.limits  # noqa: F401 - registers the storages
from bench.engines import LOG_BYTES, Engine, Rate, Session, shared_folder
from bench.measure import SCENES, Effort, Scene, measure
from bench.report import Result, heading, table
from ratekeeper.core.model import AlgorithmName

WORKS: Final = ("limits storage",)
STRATEGIES: Final[dict[str, AlgorithmName]] = {
    "fixed-window": "fixed_window",
    "moving-window": "sliding_window_log",
    "sliding-window-counter": "sliding_window_counter",
}
IN_PROCESS: Final = (SCENES[0], SCENES[1], SCENES[2])
ON_REDIS: Final = (Scene("10,000 keys", keys=10_000, limit=1_000, allowed=True),)
# A pause of the machine must not fail a check.
_PATIENCE: Final = {"socket_timeout": 10}
_numbers: Final = count()


def run_limits_storages(
    wanted: Callable[[str], bool], effort: Effort, progress: Callable[[str], None]
) -> list[Result]:
    """Measure and print them if they are selected."""
    results: list[Result] = []
    if not wanted(WORKS[0]):
        return results
    with Single() as server, shared_folder() as folder:
        shared = f"ratekeeper+shared://{folder}/NUMBER?log_bytes={LOG_BYTES}&capacity=200000"
        memory = f"ratekeeper+memory://?log_bytes={LOG_BYTES}"
        in_process = {
            "ratekeeper+memory": (memory, {}),
            "ratekeeper+shared": (shared, {}),
            "limits memory": ("memory://", {}),
        }
        on_redis = {
            "ratekeeper+redis": (f"ratekeeper+{server.uri}", _PATIENCE),
            "limits redis": (server.uri, {}),
        }
        for strategy in STRATEGIES:
            print(heading(f"storages of limits, {strategy}"), flush=True)
            for scenes, storages in ((IN_PROCESS, in_process), (ON_REDIS, on_redis)):
                for scene in scenes:
                    progress(f"measuring storages of limits, {strategy}, {scene.name} …")
                    server.flush()
                    results.append(_measured(scene, strategy, storages, effort))
                    progress("")
                    print(table(results[-1]), flush=True)
    return results


def _measured(
    scene: Scene, strategy: str, storages: dict[str, tuple[str, dict[str, Any]]], effort: Effort
) -> Result:
    engines: Sequence[Engine] = [
        Engine(
            name if full_answer else f"{name} (hit() alone)",
            partial(_open, uri, options, strategy, full_answer=full_answer),
            ours=name.startswith("ratekeeper"),
            full_answer=full_answer,
        )
        for name, (uri, options) in storages.items()
        for full_answer in (True, False)
    ]
    algorithm = STRATEGIES[strategy]
    return Result(algorithm, scene, measure(scene, algorithm, engines, effort))


def _open(
    uri: str, options: dict[str, Any], strategy: str, rate: Rate, *, full_answer: bool
) -> Session:
    # Each row has its own file, and on a server its own keys, because the rows take turns.
    number = str(next(_numbers))
    storage: Any = storage_from_string(uri.replace("NUMBER", number), **options)
    limiter = strategies.STRATEGIES[strategy](storage)
    item = RateLimitItemPerSecond(rate.limit, rate.per_seconds, namespace=number)
    hit, window_stats = limiter.hit, limiter.get_window_stats

    def check(key: str) -> bool:
        passed = hit(item, key)
        window_stats(item, key)
        return passed

    def close() -> None:
        if uri.startswith("ratekeeper"):
            storage.store.close()
        elif uri.startswith("redis"):
            storage.storage.close()

    def rest() -> None:
        if uri == "memory://":  # see bench/peers.py
            storage.timer.join()

    return Session(
        check if full_answer else partial(hit, item), allowed=bool, rest=rest, close=close
    )
