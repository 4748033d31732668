"""What an open overview of the console costs: processor time of the workers, with and without it.

    python -m bench.overview [--rules 20] [--rounds 3]

The service has two workers, 20 busy rules among its rules, and a few checks a second. A browser's
part is a client that reads the live stream. The share is of the processor time that the workers
have, so it is the share of the throughput that a busy service loses. The goal is below 1 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from tests.service_process import ServiceProcess, ask_on

from ratekeeper.service.http.tokens import create_token

WORKERS = 2
BUSY_RULES = 20
CHECKS_PER_SECOND = 50
ROUND_SECONDS = 10.0
GOAL = 0.01


def main() -> None:
    """Measure and print the cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", type=int, default=BUSY_RULES)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        read, check = (create_token(tokens, role, role) for role in ("read", "check"))
        rules = json.dumps(_document(options.rules))
        path = Path(folder) / "rules.yaml"
        path.write_text(rules, encoding="utf-8")
        with (
            ServiceProcess(str(path), "--tokens", str(tokens), workers=WORKERS) as service,
            _checks(service, check),
        ):
            cookie = _logged_in(service, read)
            with _page(service, cookie):  # the first page imports the console
                time.sleep(5)
            without, with_page = [], []
            for _ in range(options.rounds):
                without.append(_processor_share(service))
                with _page(service, cookie):
                    with_page.append(_processor_share(service))
    page = statistics.median(with_page) - statistics.median(without)
    print(f"{options.rules:,} rules, {WORKERS} workers, {CHECKS_PER_SECOND} checks a second")
    print(f"  without a page  {statistics.median(without):7.3%} of the workers' processor time")
    print(f"  an open page    {page:7.3%}, {'below' if page < GOAL else 'NOT below'} {GOAL:.0%}")


def _document(count: int) -> dict[str, object]:
    return {
        "version": 1,
        "rules": [
            {"id": f"r{n}", "match": {"endpoint": f"/e{n}"}, "by": ["user"], "limits": ["9/second"]}
            for n in range(count)
        ],
    }


@contextmanager
def _checks(service: ServiceProcess, secret: str) -> Iterator[None]:
    """Send checks at a fixed rate, on one connection to each worker that accepts one."""
    stop = threading.Event()
    headers = {"Authorization": f"Bearer {secret}"}

    def send() -> None:
        with closing(service.connect()) as one, closing(service.connect()) as other:
            number = 0
            while not stop.wait(1 / CHECKS_PER_SECOND):
                number += 1
                body = {"user": str(number % 7), "endpoint": f"/e{number % BUSY_RULES}"}
                ask_on((one, other)[number % 2], "POST", "/v1/check", body, headers)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _logged_in(service: ServiceProcess, secret: str) -> str:
    """Log in to the console; return the cookie of the session."""
    connection = service.connect()
    with closing(connection):
        sent = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/console/login", urlencode({"token": secret}), sent)
        return (connection.getresponse().headers["Set-Cookie"] or "").partition(";")[0]


@contextmanager
def _page(service: ServiceProcess, cookie: str) -> Iterator[None]:
    """Read the live stream of an open page."""
    parts = urlsplit(service.url)
    connection = HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    connection.request("GET", "/console/live", headers={"Cookie": cookie})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the live stream answers {response.status}")
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set() and response.readline():
            pass

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        connection.close()


def _processor_share(service: ServiceProcess) -> float:
    """Return the share of the workers' processor time that they use in a round."""
    before, began = _processor_s(service), time.monotonic()
    time.sleep(ROUND_SECONDS)
    return (_processor_s(service) - before) / (time.monotonic() - began) / WORKERS


def _processor_s(service: ServiceProcess) -> float:
    """Return the seconds of processor time that all threads of the workers have used."""
    total_ns = 0
    for worker in service.worker_pids():
        for thread in Path(f"/proc/{worker}/task").iterdir():
            total_ns += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
    return total_ns / 1e9


if __name__ == "__main__":
    main()
