"""Flask-Limiter and Ratekeeper on the same routes: the options promise the same statuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address

from ratekeeper.flask import RateLimit
from ratekeeper.testing import ManualClock

PATHS = ("/a", "/b", "/c")


def _view(name: str) -> Callable[[], str]:
    """Return a view with a name of its own, by which Flask-Limiter knows it."""

    def view() -> str:
        return name

    view.__name__ = view.__qualname__ = name
    return view


def _routes(app: Flask, own: Callable[[Any], Any]) -> list[int]:
    """Add three routes, the first with limits of its own; return how many of 4 each admits."""
    app.testing = True
    app.add_url_rule("/a", "a", own(_view("a")), methods=["GET", "POST"])
    app.add_url_rule("/b", "b", _view("b"))
    app.add_url_rule("/c", "c", _view("c"))
    client = app.test_client()
    return [[client.get(path).status_code for _ in range(4)].count(200) for path in PATHS] + [
        [client.post("/a").status_code for _ in range(4)].count(200)
    ]


def _flask_limiter(**own: Any) -> list[int]:
    app = Flask("theirs")
    limiter = Limiter(
        get_remote_address, app=app, default_limits=["2 per minute"], storage_uri="memory://"
    )
    return _routes(app, limiter.limit("5 per minute", **own))


def _ratekeeper(own: Callable[[RateLimit, Any], Any], per_route: bool = True) -> list[int]:
    app = Flask("ours")
    limit = RateLimit(app, "2/minute", per_route=per_route, clock=ManualClock(1_767_225_600))
    return _routes(app, lambda view: own(limit, view))


def added(limit: RateLimit, view: Any) -> Any:
    return limit("5/minute")(view)


def alone(limit: RateLimit, view: Any) -> Any:
    return limit.exempt(limit("5/minute")(view))


def one_for_each_method(limit: RateLimit, view: Any) -> Any:
    own = limit("5/minute", methods=["POST"])(limit("2/minute", methods=["GET"])(view))
    return limit.exempt(own)


@pytest.mark.parametrize(
    ("theirs", "ours", "allowed"),
    [
        # Their default is to replace the default limits, ours to add.
        ({}, alone, [4, 2, 2, 1]),
        ({"override_defaults": False}, added, [2, 2, 2, 0]),
        # Other methods get the defaults.
        ({"methods": ["POST"]}, one_for_each_method, [2, 2, 2, 4]),
    ],
)
def test_default_limits_admit_the_same(
    theirs: dict[str, Any], ours: Any, allowed: list[int]
) -> None:
    """`per_route` gives each route a count of the default, as `default_limits` of Flask-Limiter."""
    assert _flask_limiter(**theirs) == allowed
    assert _ratekeeper(ours) == allowed


def test_ratekeepers_own_default_counts_all_routes_together() -> None:
    """Without `per_route`, the default is one limit of the whole application."""
    assert _ratekeeper(added, per_route=False) == [2, 0, 0, 0]
