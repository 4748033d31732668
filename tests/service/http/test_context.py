"""Errors as replies: each error of Ratekeeper has a status."""

from __future__ import annotations

import json

import pytest

from ratekeeper import Limit
from ratekeeper.core.errors import (
    CapacityError,
    ConfigError,
    InvalidKey,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.service.http.context import EarlyReply, ServiceReply, error_reply, token_reply
from ratekeeper.service.http.tokens import TokenRejection

ERRORS: list[tuple[Exception, int, str]] = [
    (ConfigError("no"), 400, "INVALID_REQUEST"),
    (InvalidKey("no"), 400, "INVALID_REQUEST"),
    (CapacityError(5, Limit(1, per=1)), 422, "COST_EXCEEDS_CAPACITY"),
    (StoreTimeout("late"), 503, "STORE_TIMEOUT"),
    (StoreUnavailable("gone"), 503, "STORE_UNAVAILABLE"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
def test_an_error_of_ratekeeper_is_a_problem(error: Exception, status: int, code: str) -> None:
    """It has a code; a temporary error has Retry-After."""
    reply = error_reply(error)
    assert reply is not None
    assert reply.status == json.loads(reply.body)["status"] == status
    assert json.loads(reply.body)["error"]["code"] == code
    headers = dict(reply.headers)
    assert headers[b"content-type"] == b"application/problem+json"
    assert headers[b"cache-control"] == b"no-store"
    assert (b"retry-after" in headers) == (status == 503)


def test_any_other_error_is_a_defect() -> None:
    """It is not reported as the client's mistake."""
    assert error_reply(RuntimeError("x")) is None


def test_a_rejected_request_gets_its_reply() -> None:
    """The reply is sent as it is."""
    reply = ServiceReply(418, [])
    assert error_reply(EarlyReply(reply)) is reply


@pytest.mark.parametrize("status", [401, 403])
def test_a_401_has_a_challenge(status: int) -> None:
    """HTTP requires it; a 403 has none, because another token may not help."""
    reply = token_reply(TokenRejection(status, "no"))  # type: ignore[arg-type]  # both are valid
    assert (b"www-authenticate" in dict(reply.headers)) == (status == 401)
