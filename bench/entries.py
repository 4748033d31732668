"""A million entries beside the document: a change of one, the start of a node, bytes an entry.

    python -m bench.entries [--entries 1000000] [--kind overrides [--database postgresql://…]]

Another process follows the database. The time of a change is from the call until that process
decides by it. The libraries that `make bench` compares have no such entries.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import tempfile
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from ratekeeper import Limiter, Request
from ratekeeper.control.repository import Repository
from ratekeeper.rules.document.model import Override
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.entries import Entry, assignment, override_entry

CHANGES = 20
DOCUMENT = (
    "{version: 1, tiers: {default: 1/s, free: 10/s, pro: 50/s}, rules: [{id: all, by: user}]}"
)


def follow(url: str, pipe: Connection) -> None:
    """Follow a database; report the start, the memory, and the time of each change."""
    start, before = time.perf_counter(), _resident()
    with Limiter.from_rules(url, poll=0.5) as limiter:
        pipe.send((time.perf_counter() - start, _resident() - before))
        while (subject := pipe.recv()) is not None:
            request = Request(user=subject)
            while limiter.compiled_rules.tier_of(request) != "free":
                time.sleep(0.002)
            pipe.send(time.monotonic())


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def assignments(count: int) -> list[Entry]:
    """Return assignments of users to a tier."""
    return [assignment(f"user:{number:08}", "pro") for number in range(count)]


def overrides(count: int) -> list[Entry]:
    """Return overrides, one for each tenant."""
    now = datetime.now(UTC)
    end = now + timedelta(days=30)
    first = override_entry(
        Override("tenant", "NAME", multiply=2.0, until=end, reason="launch week", author="ann"), now
    )
    return [
        Entry("override", f"ov_{number:012x}", first.data.replace("NAME", f"{number:08}"))
        for number in range(count)
    ]


async def measure(url: str, many: list[Entry]) -> dict[str, float]:
    """Fill a database and measure; return the figures by name."""
    count = len(many)
    async with await Repository.open(url) as repository:
        if not await repository.number():
            await repository.apply(read(DOCUMENT), author="bench", expected=0)
        start = time.perf_counter()
        await repository.entries.write(many, author="bench")
        imported_s = time.perf_counter() - start
        many.clear()
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=follow, args=(url, theirs))
        process.start()
        started_s, used = await asyncio.to_thread(ours.recv)
        taken: list[float] = []
        for number in range(CHANGES):
            ours.send(f"{number * 17:08}")
            begun = time.monotonic()
            await repository.entries.put(
                assignment(f"user:{number * 17:08}", "free"), author="bench"
            )
            taken.append(await asyncio.to_thread(ours.recv) - begun)
        ours.send(None)
        process.join()
    taken.sort()
    return {
        "import s": imported_s,
        "start of a node s": started_s,
        "bytes an entry": used / count,
        "change in force p50 s": taken[len(taken) // 2],
        "change in force max s": taken[-1],
    }


KINDS = {"assignments": assignments, "overrides": overrides}


def main() -> None:
    """Measure each kind of entries on SQLite, or one kind in the database that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--database", default="", help="the URL of an empty PostgreSQL database")
    given = parser.parse_args()
    if given.database and not given.kind:
        parser.error("--database needs --kind: the figures are those of an empty database")
    for kind in [given.kind] if given.kind else KINDS:
        with tempfile.TemporaryDirectory() as folder:
            url = given.database or f"sqlite:///{folder}/rules.db"
            found = asyncio.run(measure(url, KINDS[kind](given.entries)))
        print(f"{url.partition(':')[0]}, {given.entries:,} {kind}")
        for name, value in found.items():
            print(f"  {name:24} {value:10.2f}")


if __name__ == "__main__":
    main()
