"""A process that sends requests through a LimitTransport, for tests of outgoing calls.

    python -m tests.integration.outgoing_worker URL STORE THREADS REQUESTS

It prints a line when it is ready, and starts at the first line of its input. Each thread sends
REQUESTS requests, one after another.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from ratekeeper.httpx import LimitTransport

LIMIT, WINDOW_NS = 10, 1_000_000_000


def main() -> None:
    """Send the requests. Fails if one of them gets no response."""
    url, store, threads, requests = sys.argv[1:]
    transport = LimitTransport(f"{LIMIT}/second", store=store, key="partner")
    with httpx.Client(transport=transport) as client, ThreadPoolExecutor(int(threads)) as pool:
        print("ready", flush=True)
        sys.stdin.readline()

        def send() -> None:
            for _ in range(int(requests)):
                client.get(url).raise_for_status()

        for done in [pool.submit(send) for _ in range(int(threads))]:
            done.result()


if __name__ == "__main__":
    main()
