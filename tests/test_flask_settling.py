"""Flask: what requests turn out to cost, and when that is settled."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Response, g, jsonify, redirect, send_file
from flask import request as flask_request
from flask.testing import FlaskClient
from werkzeug.test import EnvironBuilder

from tests.web.flask_app import app_with, statuses
from tollkeeper.flask import charge


def left(client: FlaskClient) -> int:
    """What is left of the application's limit, after the request that asks."""
    return int(client.get("/hello").headers["X-RateLimit-Remaining"])


def test_costs_are_settled() -> None:
    """`charge` is the last that was made: the view's own, or else the application's."""
    app, limit, _, client = app_with("100/minute", cost=10)

    @app.get("/cheap")
    def cheap() -> str:
        charge.settle(3)
        return str(charge.decision.remaining)

    @app.get("/own")
    @limit("50/minute", cost=20)
    def own() -> str:
        charge.refund()
        return str(charge.decision.remaining)

    assert client.get("/cheap").data == b"90"
    assert left(client) == 87
    assert [client.get("/own").data for _ in range(3)] == [b"30"] * 3


def test_a_stream_is_untouched_and_settled_at_its_end() -> None:
    """Each piece when it is asked for, and what it says of its cost counts."""
    app, _, _, client = app_with("100/minute")
    made = []

    @app.get("/stream")
    def stream() -> Response:
        mine = flask_request.environ["tollkeeper.charge"]

        def pieces() -> Iterator[str]:
            for number in range(3):
                made.append(number)
                mine.settle(10 * number)
                yield str(number)

        return Response(pieces())

    response = client.get("/stream", buffered=False)
    assert response.headers["X-RateLimit-Remaining"] == "99"
    pieces = response.iter_encoded()
    assert next(iter(pieces)) == b"0"
    assert made == [0]
    assert b"".join(pieces) == b"12"
    response.close()
    assert left(client) == 79


def test_a_file_is_sent() -> None:
    """With the headers, by whatever way the server sends files."""
    app, _, _, client = app_with("5/minute")
    app.add_url_rule("/file", "file", lambda: send_file(io.BytesIO(b"file"), "text/plain"))
    response = client.get("/file")
    assert (response.data, response.headers["X-RateLimit-Remaining"]) == (b"file", "4")


@pytest.mark.parametrize("testing", [True, False], ids=["raised", "answered"])
def test_a_view_that_raises_is_a_500(testing: bool) -> None:
    """Whether Flask answers for it or lets it through."""
    seen: list[int] = []
    app, _, _, client = app_with("5/minute", count=lambda status: bool(seen.append(status)))
    app.testing = testing

    @app.get("/raise")
    def failing() -> str:
        return str(1 / 0)

    if testing:
        with pytest.raises(ZeroDivisionError):
            client.get("/raise")
    else:
        response = client.get("/raise")
        assert (response.status_code, response.headers["X-RateLimit-Limit"]) == (500, "5")
    assert set(seen) == {500}


def test_only_failed_logins_count() -> None:
    """Who knows the password is never held up; who guesses is, and so is who guesses right then."""
    app, limit, _, client = app_with()

    @app.get("/login/<word>")
    @limit("2/minute", count=lambda status: status == 401)
    def login(word: str) -> Any:
        return redirect("/hello") if word == "right" else (jsonify(error="wrong"), 401)

    tries = ["right", "right", "right", "wrong", "right", "wrong", "right"]
    found = statuses(client, *[f"/login/{word}" for word in tries])
    assert found == [302, 302, 302, 401, 302, 401, 429]


def test_what_has_been_answered_is_the_outcome() -> None:
    """A guess whose answer breaks off was told that it was wrong, and is not let off."""
    app, limit, _, client = app_with()

    def pieces() -> Iterator[str]:
        yield "wrong"
        raise OSError("the rest is gone")

    @app.get("/login")
    @limit("2/minute", count=lambda status: status == 401)
    def login() -> Response:
        return Response(pieces(), 401)

    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            client.get("/login", buffered=True)
    assert statuses(client, "/login") == [429]


def test_an_environ_that_is_used_again_is_another_request() -> None:
    """As by who asks one application after another: each has its headers, and its own refusal."""
    one, two = app_with("2/minute")[0], app_with("1/minute")[0]
    environ = EnvironBuilder(path="/hello").get_environ()
    seen: list[tuple[str, str]] = []

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
        seen.append((status[:3], dict(headers)["X-RateLimit-Limit"]))

    for app in (one, two, two, one):
        app.wsgi_app(environ, start_response).close()  # type: ignore[attr-defined]  # Flask's has
    assert seen == [("200", "2"), ("200", "1"), ("429", "1"), ("200", "2")]


def test_the_charge_where_nothing_is_limited() -> None:
    """It can be settled, and nothing happens."""
    app, _, _, client = app_with()

    @app.get("/any")
    def anything() -> str:
        charge.settle(5)
        g.seen = charge.decision.allowed
        return str(g.seen)

    assert client.get("/any").data == b"True"
