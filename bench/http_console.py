"""POST /v1/check while the overview of the console is open, compared with the same without it.

An open overview holds one live stream, for which the service computes new events every two seconds.
Two processes differ by more than this costs, so both rows are the same process. Runs with and
without the stream alternate, and each is long enough for two ticks. A ratio is that of one pair.
`python -m bench.overview` measures the same without load, which is more exact on a busy machine.

If Chromium is installed, the note below the table says how soon the overview is painted in a new
window: the first contentful paint, by the Performance API of the browser.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from tests.redis_servers.ports import HOST

from bench.http_check import ONE_RULE, few_users
from bench.http_measure import (
    WARM_UP_SECONDS,
    Contender,
    HttpEffort,
    HttpRow,
    HttpWork,
    Progress,
    run,
)
from bench.http_servers import Serving, on_processors, ratekeeper_serve
from bench.redis_placement import Placement
from ratekeeper.service.console.sessions import Sessions
from ratekeeper.service.console.views import COOKIE
from ratekeeper.service.http.tokens import Token

RUN_SECONDS: Final = 4
# Pairs of runs for each round of the other benchmarks: the difference is small.
PAIRS_PER_ROUND: Final = 2
PAINTS: Final = 5
_CONNECT_SECONDS_MAX: Final = 60.0
CHROMIUM: Final = Path("/usr/bin/chromium")


def measure_console(
    name: str, folder: Path, placement: Placement, effort: HttpEffort, progress: Progress
) -> HttpWork:
    """Return the table with two rows: without and with an open overview."""
    rules = folder / "rules.yaml"
    rules.write_text(ONE_RULE)
    rows = (
        HttpRow("ratekeeper, 1 limit, memory", ours=False),
        HttpRow("the same, with an open overview", ours=True),
    )
    work = HttpWork(name, placement.name, rows)
    for number in range(effort.sets):
        data = folder / f"data-{number}"
        memory = ("--store", "memory://", "--no-grpc", "--data", str(data))
        contender = Contender(rows[0].name, ratekeeper_serve(rules, *memory), few_users())
        server = Serving(rows[0].name, contender.command, contender.requests[0], placement.server)
        server.runs_on = True
        with server, on_processors(placement.callers):
            secret = Sessions(data / "sessions").begin(Token("bench", "read"))
            with open_overview(server.port, secret):
                contender.load(server.port, WARM_UP_SECONDS)
            for pair in range(PAIRS_PER_ROUND * effort.rounds):
                progress(f"{name}, set {number + 1}: pair {pair + 1} …")
                _measure_pair(rows, contender, server, secret, first=pair % 2)
            if number == 0:
                progress(f"{name}: the first paint …")
                work.notes.append(paint_note(server.url, secret))
    work.notes.insert(0, spread_note(rows))
    return work


def _measure_pair(
    rows: tuple[HttpRow, HttpRow], contender: Contender, server: Serving, secret: str, *, first: int
) -> None:
    for place in (first, 1 - first):
        if place:
            with open_overview(server.port, secret):
                run(rows[1], contender, server, RUN_SECONDS)
        else:
            run(rows[0], contender, server, RUN_SECONDS)


@contextmanager
def open_overview(port: int, secret: str) -> Iterator[None]:
    """Load the page, and hold its live stream open during the block, as a browser does."""
    head = f"host: localhost\r\ncookie: {COOKIE}={secret}\r\naccept-encoding: gzip\r\n\r\n"
    with _asked(port, f"GET /console HTTP/1.1\r\n{head}", b"HTTP/1.1 200"):
        pass
    connection = _asked(port, f"GET /console/live HTTP/1.1\r\n{head}", b"text/event-stream")
    reading = threading.Thread(target=_read, args=(connection,))
    reading.start()
    try:
        yield
    finally:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        reading.join()
        connection.close()


def _asked(port: int, request: str, expected: bytes) -> socket.socket:
    """Send a request on a new connection, and return it when the answer begins as expected."""
    connection = socket.create_connection((HOST, port), timeout=_CONNECT_SECONDS_MAX)
    connection.sendall(request.encode("ascii"))
    if expected not in (begun := connection.recv(65_536)):
        connection.close()
        raise RuntimeError(f"the overview cannot be opened: {begun[:200]!r}")
    return connection


def _read(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(65_536):
            pass


def spread_note(rows: tuple[HttpRow, HttpRow]) -> str:
    """Return how much the ratios of the pairs differ."""
    without, with_it = rows
    rates = [mine / its for mine, its in zip(with_it.rates, without.rates, strict=True)]
    times = [its / mine for mine, its in zip(with_it.cpu_us, without.cpu_us, strict=True)]
    shown = [
        f"{what} {median(ratios):.4f}, half of the pairs within {low:.4f} and {high:.4f}"
        for what, ratios in (("kept", rates), ("kept cpu", times))
        for low, _, high in [quantiles(ratios, n=4)]
    ]
    return f"{len(rates)} pairs of {RUN_SECONDS} s: {'; '.join(shown)}"


def paint_note(url: str, secret: str) -> str:
    """Return how soon Chromium paints the overview, and how many bytes it transfers."""
    if find_spec("playwright") is None or not CHROMIUM.exists():
        return "Chromium or Playwright is not installed, so the first paint is not measured"
    # Imported here: the benchmarks run without them.
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - see above

    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for _ in range(PAINTS):
            context = browser.new_context(base_url=url)
            context.add_cookies([{"name": COOKIE, "value": secret, "url": f"{url}/console"}])
            page = context.new_page()
            page.goto("/console")
            page.wait_for_selector("#checks-chart canvas")
            found.append(page.evaluate(_PAINT))
            context.close()
        browser.close()
    painted, sizes = zip(*found, strict=True)
    return (
        f"the overview in a new window of Chromium: first contentful paint "
        f"after {median(painted):.0f} ms ({min(painted):.0f} to {max(painted):.0f}), "
        f"{median(sizes) / 1_000:.0f} KB transferred before the live stream"
    )


_PAINT: Final = """() => [
  performance.getEntriesByName("first-contentful-paint")[0].startTime,
  [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .reduce((sum, each) => sum + each.transferSize, 0),
]"""
