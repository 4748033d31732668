"""Limit a Flask application with several gunicorn workers exactly, without any server.

All workers of a machine open the same `shared://` file: a limit of 20 is 20, however many workers
there are, and a worker that is killed leaves no lock behind. The counts survive a restart.

    gunicorn --workers 4 shop:app

The trap is the default, `memory://`, which is right for one process: each worker admits the whole
limit, so four workers admit four times as much. Ratekeeper logs a warning when several workers use
it.

Put the file into a folder that only the service can write, such as systemd's RuntimeDirectory
(/run/shop). On several machines, use `redis://…`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from functools import partial

from flask import Flask

from ratekeeper.flask import RateLimit

WORKERS = 3


def make_app(store: str) -> Flask:
    app = Flask("shop")
    RateLimit(app, "20/hour", store=store)
    app.add_url_rule("/", view_func=lambda: "hello")
    return app


def serve(store: str, requests: int) -> int:
    """Serve in a worker of its own. Return how many of the requests pass."""
    client = make_app(store).test_client()
    return [client.get("/").status_code for _ in range(requests)].count(200)


def main() -> None:
    fork = multiprocessing.get_context("fork")  # as gunicorn does it
    with tempfile.TemporaryDirectory() as folder, fork.Pool(WORKERS) as pool:
        store = f"shared://{folder}/shop.limits?capacity=1000"
        shared = pool.map(partial(serve, store), [100] * WORKERS, chunksize=1)
        memory = pool.map(partial(serve, "memory://"), [100] * WORKERS, chunksize=1)
        later = serve(store, 10)  # another process, as after a restart

    print(f"shared://: the workers admit {shared}, {sum(shared)} in all")
    assert sum(shared) == 20
    assert later == 0
    print(f"memory://: the workers admit {memory}, {sum(memory)} in all")
    assert sum(memory) == 20 * WORKERS


if __name__ == "__main__":
    main()
