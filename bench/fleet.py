"""Checks that a node answers itself, and a fleet of real services on a real Redis Cluster.

    python -m bench.fleet                # 20 services, 3 primaries and 3 replicas, a few minutes
    python -m bench.fleet --nodes 8 --seconds 10

`make bench` measures a check that is answered in the node beside a check in process (`run_fleet`).

The fleet runs on this machine and is loaded by one driver, at a bounded rate: each user has the
rate of the traffic mix (light 50, heavy 900, abusive 5,000 a minute), and the limit is 1,000 a
minute. Each request goes to a random node. What the driver sends and receives is all that the
numbers are made of, apart from the counters of the services and of Redis:

over        units above the limit in the worst interval of any user, by the history checker of
            `tests/faults`
in node     the share of checks that a node answered itself
calls       calls of Redis for a check, with those that give units back or report charges
fewer       requests that a central limiter would have admitted in addition, of all requests
enforced    from the first denial of a subject anywhere to the last admission anywhere
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

from tests.faults.checker import Admitted, excess
from tests.redis_servers import Cluster, Single
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess

from bench.engines import OURS, Engine, Rate, Session
from bench.measure import SCENES, SEED, Effort, measure
from bench.report import Result, heading, table
from ratekeeper import Fleet, Limit, Limiter
from ratekeeper.core.clock import NS_PER_SECOND, SystemClock
from ratekeeper.core.model import Consistency
from ratekeeper.decide.leasing import Lease
from ratekeeper.decide.stores import open_fallback_store
from ratekeeper.testing import ManualClock

WORKS: Final = ("fleet",)
MODES: Final[tuple[Consistency, ...]] = ("strict", "leased", "eventual")
LIMIT: Final = Limit(1_000, per=60)
SMALL: Final = Limit(200, per=3_600)
BURST: Final = 2_000
# Users of each kind, and their requests in a minute: a fifth of the simulator's, for a fifth of its
# nodes.
MIX: Final = ((50, 50), (8, 900), (2, 5_000))
REACHED: Final = 20
REACHED_PER_SECOND: Final = 500
CONNECTIONS: Final = 2
WARM_UP: Final = 20_000
SUBJECTS: Final = 1_000_000
READY_S_MAX: Final = 120.0
# Each check, lease and report is a call of a script. Redis counts the commands in it, too.
_SCRIPTS: Final = ("cmdstat_evalsha", "cmdstat_eval")


# ── A check that is answered in the node ──────────────────────────────────────────────────────────


def run_fleet(wanted: Callable[[str], bool], effort: Effort) -> list[Result]:
    """Measure and print it if it is selected."""
    if not wanted(WORKS[0]):
        return []
    with Single() as server, TemporaryDirectory(prefix="ratekeeper-bench-") as folder:
        tables = {"memory": "memory://", "shared": f"shared://{folder}/fleet"}
        engines = [
            OURS[0],
            *(
                Engine(f"{mode}, {name} table", _opener(server.uri, mode, uri), ours=True)
                for mode in MODES[1:]
                for name, uri in tables.items()
            ),
        ]
        print(heading("a check that is answered in the node, beside one in process"), flush=True)
        results = []
        for scene in SCENES[:2]:
            rows = measure(scene, "token_bucket", engines, effort)
            results.append(Result("token_bucket", scene, rows))
            print(table(results[-1]), flush=True)
    return results


def _opener(uri: str, mode: Consistency, table_uri: str) -> Callable[[Rate], Session]:
    def opened(rate: Rate) -> Session:
        limiter = Limiter(
            rate.limit_value,
            store=f"{uri}?deadline_ms=10000",
            on_failure="raise",
            consistency=mode,
            fleet=Fleet(store=table_uri, lease_seconds=2),
            name=f"{mode}-{time.monotonic_ns()}",
        )
        if rate.limit > 1:
            # A lease is as large as the demand that the node has seen. From here on it is larger
            # than a batch, so that few batches have a call of Redis in them.
            for _ in range(WARM_UP):
                limiter.check("user:0")
        return Session(limiter.check, allowed=bool, close=limiter.close)

    return opened


# ── A fleet ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and its answer."""

    user: str
    sent_ns: int
    answered_ns: int
    allowed: bool
    retry_after_s: float = 0.0
    failed: bool = False
    """The service could not decide: its Redis did not answer in time."""


class NodeClient:
    """Requests to one service, on a few connections."""

    def __init__(self, url: str, *, may_fail: bool = False) -> None:
        found = urlsplit(url)
        self._at = (found.hostname or "", found.port or 0)
        self._may_fail = may_fail
        self._idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )

    async def connect(self) -> None:
        """Open the connections anew: a service closes those that are idle for ten seconds."""
        self.close()
        for _ in range(CONNECTIONS):
            self._idle.put_nowait(await asyncio.open_connection(*self._at))

    async def check(self, endpoint: str, user: str) -> Sent:
        """Check one request."""
        body = json.dumps({"user": user, "endpoint": endpoint}).encode()
        reader, writer = await self._idle.get()
        sent_ns = time.time_ns()
        writer.write(
            b"POST /v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        answer = await reader.readexactly(length)
        answered_ns = time.time_ns()
        self._idle.put_nowait((reader, writer))
        status = int(head.split(b" ", 2)[1])
        if status == 503 and self._may_fail:
            return Sent(user, sent_ns, answered_ns, allowed=False, failed=True)
        if status not in (200, 429):
            raise RuntimeError(f"a service answered {status}")
        retry_after_s = 0.0 if status == 200 else json.loads(answer)["retry_after"]
        return Sent(user, sent_ns, answered_ns, status == 200, retry_after_s)

    def close(self) -> None:
        """Close the connections."""
        while not self._idle.empty():
            self._idle.get_nowait()[1].close()


def schedule(seconds: float, chance: random.Random) -> list[tuple[float, str]]:
    """Return the requests of the traffic mix: when, and of which user."""
    found = []
    for kind, (users, per_minute) in enumerate(MIX):
        for number in range(users):
            at_s = chance.expovariate(per_minute / 60)
            while at_s < seconds:
                found.append((at_s, f"{kind}-{number}"))
                at_s += chance.expovariate(per_minute / 60)
    return sorted(found)


async def drive(
    nodes: Sequence[NodeClient],
    endpoint: str,
    requests: Sequence[tuple[float, str]],
    seed: int = SEED,
) -> list[Sent]:
    """Send each request at its time to a random node."""
    await asyncio.gather(*(node.connect() for node in nodes))
    chance = random.Random(seed)
    began_s = time.monotonic()
    tasks = []
    for at_s, user in requests:
        wait_s = began_s + at_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(chance.choice(nodes).check(endpoint, user)))
    return list(await asyncio.gather(*tasks))


def over_of(limit: Limit, found: Sequence[Sent]) -> int:
    """Return the units above the limit in the worst interval of any user."""
    users: dict[str, list[Admitted]] = {}
    for each in found:
        if each.allowed:
            users.setdefault(each.user, []).append(Admitted(each.sent_ns, each.answered_ns))
    return max((excess(limit, admitted) for admitted in users.values()), default=0)


def central(limit: Limit, found: Sequence[Sent]) -> int:
    """Return how many of these requests one central limiter admits."""
    # Not at 0: windows begin by the clock.
    clock = ManualClock(min(each.sent_ns for each in found) // NS_PER_SECOND)
    with Limiter(limit, clock=clock) as limiter:
        admitted = 0
        for each in sorted(found, key=lambda one: one.sent_ns):
            clock.advance(max((each.sent_ns - clock.now_ns()) / NS_PER_SECOND, 0))
            admitted += limiter.check(each.user).allowed
    return admitted


async def enforced_ms(nodes: Sequence[NodeClient], endpoint: str) -> list[float]:
    """Return, for each of some subjects, how long after the first denial a node still admitted."""
    found = []
    for number in range(REACHED):
        subject = f"reached-{number}"
        count = round(1.5 * SMALL.limit)
        requests = [(place / REACHED_PER_SECOND, subject) for place in range(count)]
        sent = await drive(nodes, endpoint, requests, SEED + number)
        first_ns = min(each.answered_ns for each in sent if not each.allowed)
        last_ns = max(each.answered_ns for each in sent if each.allowed)
        found.append(max(last_ns - first_ns, 0) / 1e6)
    return sorted(found)


def node_answers(services: Sequence[ServiceProcess], rule: str) -> Counter[str]:
    """Return the checks of a rule by who answered them, over all services."""
    found: Counter[str] = Counter()
    for service in services:
        for line in service.ask("GET", "/metrics").body.decode().splitlines():
            if line.startswith("ratekeeper_fleet_checks_total{") and f'rule="{rule}"' in line:
                outcome = line.partition('outcome="')[2].partition('"')[0]
                found[outcome] += int(float(line.rpartition(" ")[2]))
    return found


def redis_calls(cluster: Cluster) -> int:
    """Return how many scripts the primaries have executed."""
    return sum(
        primary.admin.info("commandstats").get(name, {}).get("calls", 0)
        for primary in cluster.primaries()
        for name in _SCRIPTS
    )


def document() -> dict[str, Any]:
    """Return a rule for each mode and each kind of measurement."""

    def rule(kind: str, mode: str, limit: Limit) -> dict[str, Any]:
        return {
            "id": f"{kind}-{mode}",
            "match": {"endpoint": f"/{kind}/{mode}"},
            "by": ["user"],
            "limits": [{"limit": limit.limit, "per": f"{limit.per:g}s"}],
            "consistency": mode,
        }

    kinds = (("mix", LIMIT), ("burst", LIMIT), ("reached", SMALL))
    return {
        "version": 1,
        "rules": [rule(kind, mode, limit) for mode in MODES for kind, limit in kinds],
    }


async def measure_mode(
    mode: str,
    services: Sequence[ServiceProcess],
    nodes: Sequence[NodeClient],
    cluster: Cluster,
    requests: Sequence[tuple[float, str]],
) -> dict[str, Any]:
    """Return the numbers of one mode."""
    before = redis_calls(cluster)
    sent = await drive(nodes, f"/mix/{mode}", requests)
    calls = redis_calls(cluster) - before
    answers = node_answers(services, f"mix-{mode}")
    own = answers["allowed"] + answers["denied"]
    admitted = sum(each.allowed for each in sent)
    burst = await drive(nodes, f"/burst/{mode}", [(0.0, "burst")] * BURST)
    spent_ms = await enforced_ms(nodes, f"/reached/{mode}")
    return {
        "mode": mode,
        "requests": len(sent),
        "admitted": admitted,
        "over": over_of(LIMIT, sent),
        "over_in_a_burst": over_of(LIMIT, burst),
        "in_node": own / max(own + answers["asked"], 1),
        "calls_per_check": calls / len(sent),
        "fewer": (central(LIMIT, sent) - admitted) / len(sent),
        "enforced_ms_p50": median(spent_ms),
        "enforced_ms_max": spent_ms[-1],
        "answer_ms_p50": median(each.answered_ns - each.sent_ns for each in sent) / 1e6,
    }


async def measure_fleet(count: int, seconds: float) -> list[dict[str, Any]]:
    """Start the services and the cluster, and return the numbers of each mode."""
    requests = schedule(seconds, random.Random(SEED))
    with Cluster() as cluster, ExitStack() as stack:
        store = ("--store", f"{cluster.uri}?deadline_ms=2000", "--nodes", str(count))
        gossip = ("--gossip", "127.0.0.1:0", "--peers", "store")
        services = [ServiceProcess(document(), *store, *gossip) for _ in range(count)]
        for place, service in enumerate(services):
            stack.enter_context(service)
            progress(f"{place + 1} of {count} services run …")
        await_members(services, count)
        nodes = [NodeClient(service.url) for service in services]
        found = []
        for mode in MODES:
            progress(f"measuring {mode} …")
            found.append(await measure_mode(mode, services, nodes, cluster, requests))
        progress("")
        for node in nodes:
            node.close()
    return found


def await_members(services: Sequence[ServiceProcess], count: int) -> None:
    """Wait until every node knows all others."""

    def live(service: ServiceProcess) -> int:
        for line in service.ask("GET", "/metrics").body.decode().splitlines():
            if line.startswith("ratekeeper_fleet_live_nodes "):
                return int(float(line.rpartition(" ")[2]))
        return 0

    for service in services:
        until(
            lambda service=service: live(service) == count,  # type: ignore[misc]  # a default
            f"a node knows {count} nodes",
            READY_S_MAX,
        )


# ── The memory of a node ──────────────────────────────────────────────────────────────────────────


def fill_table() -> None:
    """Fill a node's table with the leases of SUBJECTS subjects; print the memory in bytes."""
    clock = SystemClock()
    with TemporaryDirectory(prefix="ratekeeper-bench-") as folder:
        uri = f"shared://{folder}/fleet?allowances={SUBJECTS + 1_000}"
        store = open_fallback_store(uri, clock)
        assert store.allowances is not None
        counter = store.allowances.gate((LIMIT,), "users", "leased", NS_PER_SECOND)
        with Limiter(LIMIT) as limiter:
            decision = limiter.check("user")
        lease = Lease(5, time.time_ns(), 60 * NS_PER_SECOND)
        for number in range(SUBJECTS):
            counter.put(f"user:{number:08}", lease, decision, 1)
        held = store.allowances.stats().held
        store.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"held": held, "resident_bytes": peak}))


def measure_memory() -> dict[str, int]:
    """Return the memory of a process whose table has SUBJECTS leases."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.fleet", "--fill-table"],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


# ── The report ────────────────────────────────────────────────────────────────────────────────────

_COLUMNS: Final = (
    ("", "{mode}"),
    ("requests", "{requests:,}"),
    ("over", "{over}"),
    ("burst over", "{over_in_a_burst}"),
    ("in node", "{in_node:.1%}"),
    ("calls", "{calls_per_check:.3f}"),
    ("fewer", "{fewer:.3%}"),
    ("enforced p50", "{enforced_ms_p50:.0f} ms"),
    ("max", "{enforced_ms_max:.0f} ms"),
    ("answer p50", "{answer_ms_p50:.2f} ms"),
)


def report(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of all modes."""
    rows = [[name for name, _ in _COLUMNS]]
    rows += [[form.format(**each) for _, form in _COLUMNS] for each in found]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def progress(text: str) -> None:
    """Show what runs, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Measure a fleet and print its numbers."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=20, help="services [default: 20]")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of the traffic mix, for each mode"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there too")
    parser.add_argument("--fill-table", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill_table:
        fill_table()
        return
    users = sum(count for count, _ in MIX)
    rate = sum(count * per_minute for count, per_minute in MIX) / 60
    print(
        f"{options.nodes} services with a worker each, 3 + 3 Redis Cluster, {os.cpu_count()} "
        f"processors; {users} users, {rate:.0f} requests/s, limit {LIMIT.limit}/minute; "
        f"burst: {BURST:,} requests of one user at once",
        flush=True,
    )
    found = asyncio.run(measure_fleet(options.nodes, options.seconds))
    print(report(found), flush=True)
    memory = measure_memory()
    print(
        f"a process with {memory['held']:,} leases in its node's table: "
        f"{memory['resident_bytes'] / 1e6:,.0f} MB resident"
    )
    if options.json:
        options.json.write_text(json.dumps({"modes": found, "memory": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()
