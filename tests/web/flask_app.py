"""A Flask application for tests, and a client of it."""

from __future__ import annotations

from typing import Any

from flask import Flask
from flask.testing import FlaskClient

from ratekeeper.flask import RateLimit
from ratekeeper.testing import ManualClock

NOW_S = 1_767_225_600


def app_with(
    limits: str | None = None, **options: Any
) -> tuple[Flask, RateLimit, ManualClock, FlaskClient]:
    """Return an application with limits, a manual clock and one route."""
    app = Flask(__name__)
    app.secret_key = "of these tests"
    app.testing = True
    clock = ManualClock(NOW_S)
    limit = RateLimit(app, limits, clock=clock, **options)

    @app.get("/hello")
    def hello() -> str:
        return "hello"

    return app, limit, clock, app.test_client()


def statuses(client: FlaskClient, *paths: str, **more: Any) -> list[int]:
    return [client.get(path, **more).status_code for path in paths]
