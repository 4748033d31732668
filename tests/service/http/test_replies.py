"""Errors as replies: every error of ours has a status that says what to do."""

from __future__ import annotations

import json

import pytest

from tollkeeper import Limit
from tollkeeper.core.errors import CapacityError, ConfigError, InvalidKey, StoreTimeout
from tollkeeper.service.http.replies import Refusal, Reply, error_reply, refused_reply
from tollkeeper.service.http.tokens import Refused

ERRORS: list[tuple[Exception, int, str]] = [
    (ConfigError("no"), 400, "INVALID_REQUEST"),
    (InvalidKey("no"), 400, "INVALID_REQUEST"),
    (CapacityError(5, Limit(1, per=1)), 422, "COST_EXCEEDS_CAPACITY"),
    (StoreTimeout("late"), 503, "STORE_UNAVAILABLE"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
def test_an_error_of_ours_is_a_problem(error: Exception, status: int, code: str) -> None:
    """With its code; what may be over in a moment says when to try again."""
    reply = error_reply(error)
    assert reply is not None
    assert reply.status == json.loads(reply.body)["status"] == status
    assert json.loads(reply.body)["error"]["code"] == code
    headers = dict(reply.headers)
    assert headers[b"content-type"] == b"application/problem+json"
    assert headers[b"cache-control"] == b"no-store"
    assert (b"retry-after" in headers) == (status == 503)


def test_anything_else_is_a_defect() -> None:
    """Not answered as if it were the client's."""
    assert error_reply(RuntimeError("x")) is None


def test_a_refusal_is_what_it_carries() -> None:
    """As it is."""
    reply = Reply(418, [])
    assert error_reply(Refusal(reply)) is reply


@pytest.mark.parametrize("status", [401, 403])
def test_a_401_has_a_challenge(status: int) -> None:
    """As HTTP asks; a 403 has none, for another token may not help."""
    reply = refused_reply(Refused(status, "no"))  # type: ignore[arg-type]  # both are right
    assert (b"www-authenticate" in dict(reply.headers)) == (status == 401)
