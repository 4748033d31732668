"""Problem JSON: its members, and what is never in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import CapacityError, ConfigError, Limit, Limiter
from tollkeeper.web.problems import (
    DETAIL_LENGTH_MAX,
    bad_request_of,
    capacity_refusal_of,
    problem,
    problem_answer,
)


def test_a_cost_that_never_fits_is_a_422() -> None:
    """It names what would fit, and no Retry-After suggests that waiting helps."""
    limiter = Limiter("10/minute burst 5")
    with pytest.raises(CapacityError) as raised:
        limiter.check("k", cost=50)
    answer = capacity_refusal_of(raised.value)
    assert answer.status == 422
    assert dict(answer.headers) == {
        "Content-Type": "application/problem+json",
        "Cache-Control": "no-store",
    }
    members = json.loads(answer.body)
    assert members["type"] == "about:blank"
    assert members["error"]["code"] == "COST_EXCEEDS_CAPACITY"
    assert members["error"]["details"] == {"limit": 15, "window_seconds": 60, "cost": 50}
    assert "at most 15 each" in members["detail"]


def test_a_cost_beyond_all_numbers_is_not_written_out() -> None:
    """JSON has no place for 5,001 digits, and neither has Python's printer."""
    answer = capacity_refusal_of(CapacityError(10**5_000, Limit(1, per=0.5)))
    assert json.loads(answer.body)["error"]["details"] == {"limit": 1, "window_seconds": 0.5}


def test_what_cannot_be_counted_is_a_400() -> None:
    """The error's own words are the detail."""
    answer = bad_request_of(ConfigError("user=5 is not text; write it as text"))
    assert answer.status == 400
    members = json.loads(answer.body)
    assert members["title"] == "Bad Request"
    assert members["detail"] == "user=5 is not text; write it as text"
    assert members["error"]["code"] == "INVALID_REQUEST"


def test_a_long_detail_is_cut() -> None:
    """A body stays small, whatever was wrong."""
    assert len(str(problem(400, "X", "x" * 10_000)["detail"])) == DETAIL_LENGTH_MAX


@given(st.text())
def test_any_text_is_valid_json(detail: str) -> None:
    """The bytes are ASCII, and what is read back is text that UTF-8 can hold."""
    body = problem_answer(problem(400, "INVALID_REQUEST", detail), []).body
    read = json.loads(body.decode("ascii"))
    read["detail"].encode("utf-8")
    if detail.isprintable() and len(detail) <= DETAIL_LENGTH_MAX:
        assert read["detail"] == detail
