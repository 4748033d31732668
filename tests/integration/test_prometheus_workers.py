"""The counts of all gunicorn workers, in the multi-process mode of `prometheus_client`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.web_workers import ask, gunicorn, serving
from tests.metrics.scraping import decisions
from tests.redis_servers.waiting import until

APPLICATION = """
import os
from flask import Flask
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from ratekeeper.flask import RateLimit
from ratekeeper.metrics.prometheus import register

app = Flask(__name__)
limit = RateLimit(app, store=os.environ["STORE"])
register()

@app.get("/hello")
def hello():
    return str(os.getpid())

@app.get("/items/<int:number>")
@limit("5/hour", name="items")
def items(number):
    return str(number)

@app.get("/metrics")
def metrics():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry)
"""


def test_a_scrape_has_the_counts_of_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever worker answers; those of a killed worker stay."""
    (tmp_path / "counters").mkdir()
    (tmp_path / "counted_app.py").write_text(APPLICATION)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "counters"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    expected = {
        ("items", "/items/<int:number>", "allowed"): 5.0,
        ("items", "/items/<int:number>", "denied"): 35.0,
    }
    with serving([*gunicorn("counted_app:app"), "--preload"], tmp_path) as url:
        replies = ask(url, [f"/items/{number}" for number in range(40)])
        assert sum(each.status_code == 200 for each in replies) == 5

        def counted() -> bool:
            # prometheus_client answers 500 if it reads the file of a worker that is creating it.
            scraped = ask(url, ["/metrics"])[0]
            return scraped.status_code == 200 and decisions(scraped.text, "items") == expected

        until(counted, "all workers have written their counts", 30)
        os.kill(int(ask(url, ["/hello"])[0].text), signal.SIGKILL)
        until(counted, "the counts of the killed worker stay", 30)
