"""A request's bill: its charges, their names, and what a response is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from tollkeeper import ConfigError
from tollkeeper.core.model import NAME_LENGTH_MAX
from tollkeeper.testing import ManualClock
from tollkeeper.web.bill import Bill
from tollkeeper.web.calls import WsgiCall
from tollkeeper.web.guard import Guard, Terms
from tollkeeper.web.terms import HOOKS, plain

CALL = WsgiCall({"REMOTE_ADDR": "203.0.113.9"})


def guard(limits: str, name: str = "", **more: Any) -> Guard:
    return Guard(Terms(limits=limits, name=name, clock=ManualClock(1_767_225_600), **more))


def remaining(one: Guard) -> int:
    return int(one._limiter.peek(one._key_of(CALL)).remaining)


@pytest.mark.parametrize("name", HOOKS)
def test_async_hooks_are_refused_where_nobody_awaits(name: str) -> None:
    """What they return is true: a `skip` would let everybody through."""

    async def hook(*args: object) -> bool:
        return False

    hooks: dict[str, Any] = {name: hook}
    with pytest.raises(ConfigError, match=f"{name}=.*hook is async"):
        plain(Terms(limits="1/minute", **hooks))
    hooks[name] = lambda *args: False
    terms = Terms(limits="1/minute", **hooks)
    assert plain(terms) is terms


def test_what_one_denies_costs_nothing_in_the_others() -> None:
    """The first was charged when the second denied: it is given back at once."""
    wide, narrow = guard("5/minute", "wide"), guard("1/minute", "narrow")
    for expected in (None, 429):
        bill = Bill(wide)
        assert bill.refusal(wide, CALL) is None
        refusal = bill.refusal(narrow, CALL)
        assert (refusal and refusal.status) == expected
    assert (remaining(wide), remaining(narrow)) == (4, 0)


def test_headers_speak_of_all_charges() -> None:
    """The tightest in most, every policy in one; on a refusal as well."""
    wide, narrow = guard("5/minute", "wide"), guard("1/minute", "narrow")
    bill = Bill(wide)
    assert [bill.refusal(each, CALL) for each in (wide, narrow)] == [None, None]
    headers = dict(bill.headers_beside(["Content-Type"]))
    assert headers["RateLimit"] == '"narrow";r=0;t=60'
    assert headers["RateLimit-Policy"] == '"wide";q=5;w=60, "narrow";q=1;w=60'
    assert bill.charge.decision.limit == 1


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError(), 500), (KeyboardInterrupt(), None), (SystemExit(), None)]
)
def test_how_a_failure_counts(error: BaseException, status: int | None) -> None:
    """An exception is a 500; being ended from outside is no outcome."""
    bill = Bill(guard("5/minute"))
    bill.fail(error)
    assert bill.status == status


@pytest.mark.parametrize(("status", "left"), [(401, 4), (200, 5), (None, 4)])
def test_outcomes_are_settled_by_status(status: int | None, left: int) -> None:
    """Given back where it does not count; where there was none, it does: guessers could hang up."""
    one = guard("5/minute", count=lambda status: status == 401)
    bill = Bill(one)
    bill.refusal(one, CALL)
    bill.status = status
    bill.settle()
    bill.settle()
    assert remaining(one) == left


def test_names_on_a_bill_are_apart_and_fit() -> None:
    """A second of one name has a number; a long one, or one that cannot be shown, is hashed."""
    bill = Bill(guard("5/minute"))
    assert [bill.name_of("a"), bill.name_of("a"), bill.name_of("b")] == ["a", "a#2", "b"]
    names = {bill.name_of(name) for name in ("x" * 500, "x" * 500, "x" * 501, "a\nb", "\ud800")}
    assert len(names) == 5
    assert all(len(name) <= NAME_LENGTH_MAX and name.isprintable() for name in names)


def test_an_empty_bill_says_nothing() -> None:
    """A request that nobody limits has no headers."""
    bill = Bill(guard("5/minute"))
    assert bill.charge.decision.allowed
    assert bill.headers_beside([]) == []
