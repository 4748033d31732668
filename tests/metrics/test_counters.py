"""What is counted, by name; sums of several processes; and that nothing goes down."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import Limiter, Request
from tollkeeper.core.model import ResultKind
from tollkeeper.metrics import counters
from tollkeeper.metrics.counters import (
    BY_NAME,
    FAMILIES,
    JOIN,
    Counters,
    Lasting,
    Reading,
    Snapshot,
)
from tollkeeper.metrics.histograms import LENGTH
from tollkeeper.testing import ManualClock

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [{"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["2/minute"]}],
    "deny": ["api_key:bad"],
}


def snapshot(**values: float) -> Snapshot:
    """With one value of each family, without labels."""
    found = Snapshot()
    for name, value in values.items():
        found.put(name, value)
    return found


def test_names_are_as_prometheus_wants_them() -> None:
    """Small letters, units in full at the end, labels that are no keys."""
    assert len(BY_NAME) == len(FAMILIES)
    for family in FAMILIES:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
        assert family.help.endswith(".")
        assert family.full_name.endswith("_total") == (family.kind == "counter")
        known = {"rule", "outcome", "source", "route", "status", "code", "kind", "node", "version"}
        assert set(family.labels) <= known


def test_the_reference_has_them_all() -> None:
    """Each with its labels, and none that there is not."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(tollkeeper_\w+)` \| ([a-z, ]*)\|", page, re.MULTILINE)
    told = {name: tuple(filter(None, labels.strip().split(", "))) for name, labels in rows}
    assert told == {family.full_name: family.labels for family in FAMILIES}


def test_counters_are_added_and_of_gauges_the_worst_is_told() -> None:
    """By how each family is merged; what only one has, stays."""
    one = snapshot(denied_cache_hits=3, rules_age_seconds=1.5, start_time_seconds=100)
    one.histograms["decision_seconds"] = [1] * LENGTH
    other = snapshot(denied_cache_hits=4, rules_age_seconds=9.5, start_time_seconds=90)
    other.put("penalties", 2, "users", "block")
    other.histograms["decision_seconds"] = [2] * LENGTH
    one.add(other)
    assert one.values == {
        "denied_cache_hits": {"": 7},
        "rules_age_seconds": {"": 9.5},
        "start_time_seconds": {"": 90},
        "penalties": {f"users{JOIN}block": 2},
    }
    assert one.histograms == {"decision_seconds": [3] * LENGTH}


def test_what_another_version_wrote_is_left_out() -> None:
    """A family that is not known, or a histogram with other ranges, spoils nothing."""
    one = snapshot(denied_cache_hits=1)
    other = snapshot(of_the_future=1)
    other.histograms = {"decision_seconds": [1, 2], "of_the_future": [1] * LENGTH}
    one.add(other)
    assert one == snapshot(denied_cache_hits=1)


def test_of_a_worker_that_is_gone_only_counts_remain() -> None:
    """How old its rules were is of no more interest; when it started is: the first is told."""
    gone = snapshot(denied_cache_hits=3, rules_age_seconds=99, start_time_seconds=100)
    assert gone.lasting() == snapshot(denied_cache_hits=3, start_time_seconds=100)


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 9), st.integers(0, 9))),
        max_size=8,
    )
)
def test_counts_by_rule_never_go_down(seen: list[dict[str, tuple[int, ...]]]) -> None:
    """Whatever rules come, go, and begin anew; and they are at least what is counted now."""
    lasting = Lasting()
    told: dict[str, list[int]] = {}
    for now in seen:
        lasting.update(now)
        for rule, row in [*told.items(), *now.items()]:
            assert all(n >= was for n, was in zip(lasting.totals[rule], row, strict=True))
        told = {rule: list(total) for rule, total in lasting.totals.items()}


def test_a_rule_that_left_keeps_what_it_counted() -> None:
    """And goes on from there when it is back."""
    lasting = Lasting()
    for now, total in [
        ({"a": (5, 1)}, [5, 1]),
        ({"a": (6, 1)}, [6, 1]),
        ({}, [6, 1]),
        ({"a": (2, 0)}, [8, 1]),
        ({"a": (3, 0)}, [9, 1]),
        ({"a": (1, 1)}, [10, 2]),
    ]:
        lasting.update(now)
        assert lasting.totals == {"a": total}


def test_rules_have_names_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came later are told together; no name changes sides, so nothing goes down."""
    monkeypatch.setattr(counters, "RULES_MAX", 2)
    lasting = Lasting()
    lasting.update({"a": (1,)})
    lasting.update({"d": (100,), "c": (10,), "b": (1,), "a": (1,)})
    assert lasting.totals == {"a": [1], "d": [100], "(others)": [11]}


def test_the_services_own_counts() -> None:
    """Requests by route and status, calls by code, and how long checks took."""
    own = Counters()
    own.requests["/v1/check", 200] = 3
    own.grpc_requests["OK"] = 2
    own.decision_seconds.note(1)
    found = own.snapshot()
    assert found.values == {
        "requests": {f"/v1/check{JOIN}200": 3},
        "grpc_requests": {"OK": 2},
    }
    assert sum(found.histograms["decision_seconds"][:-1]) == 1


def test_a_limiter_is_read() -> None:
    """Its rules' counts by outcome and source, its lists, and how its rules are."""
    with Limiter.from_rules(RULES, clock=ManualClock()) as limiter:
        for _ in range(3):
            limiter.check(Request(user="1"))
        limiter.check(Request(api_key="bad"))
        found = Reading(limiter).snapshot()
    assert found.values["checks"] == {
        f"users{JOIN}allowed{JOIN}store": 2,
        f"users{JOIN}denied{JOIN}store": 1,
        f"(none){JOIN}blocked{JOIN}none": 1,
    }
    assert found.values["rules_failing"] == {"": 0}
    assert found.values["rules_load_errors"] == {"": 0}
    assert "breaker_state" not in found.values
    assert found.histograms["store_seconds"] == [0] * LENGTH


def test_a_limiter_without_rules_is_read_too() -> None:
    """It has a store, and has counted nothing of its own."""
    with Limiter("2/minute") as limiter:
        values = Reading(limiter).snapshot().values
        assert {name for name, found in values.items() if found} == {
            "denied_cache_hits",
            "coalesced_checks",
        }


def test_kinds_without_a_rule_are_those_of_rulings() -> None:
    """One word for one idea."""
    assert {"unlimited", "exempt", "blocked"} < set(get_args(ResultKind))


class _Away:
    """A store that counts and has breakers, as one in Redis does."""

    def __init__(self) -> None:
        self.hits = {"users": 2, "trial": 9}
        self.monitor = self

    def counters(self) -> dict[str, int]:
        return {"denied_cache_hits": 11, "coalesced_checks": 7}

    def denied_by_rule(self) -> dict[str, int]:
        return self.hits

    def close(self) -> None:
        """As the limiter does, which believes that it opened it."""

    def breakers(self) -> list[Any]:
        return [
            SimpleNamespace(address="h:1", state="open", opened_times=3, failed_calls=9),
            SimpleNamespace(address="h:2", state="closed", opened_times=0, failed_calls=1),
        ]


def test_a_store_that_is_away_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its breakers by server; denials it was not asked for, apart from the others."""
    with Limiter.from_rules(RULES, clock=ManualClock()) as limiter:
        for _ in range(5):
            limiter.check(Request(user="1"))
        away = _Away()
        monkeypatch.setattr(limiter, "_store", away)
        reading = Reading(limiter)
        found = reading.snapshot().values
        assert found["checks"] == {
            f"users{JOIN}allowed{JOIN}store": 2,
            f"users{JOIN}denied{JOIN}store": 1,
            f"users{JOIN}denied{JOIN}denied_cache": 2,
        }
        assert found["breaker_state"] == {"h:1": 2, "h:2": 0}
        assert found["node_failures"] == {"h:1": 9, "h:2": 1}
        assert found["breaker_opened"] == {"h:1": 3, "h:2": 0}
        assert found["denied_cache_hits"] == {"": 11}
        assert found["coalesced_checks"] == {"": 7}
        away.hits["users"] = 30  # in shadow mode, or for another rule of the same requests
        assert reading.snapshot().values["checks"] == found["checks"]
        limiter.check(Request(user="1"))  # which the store was asked for
        again = reading.snapshot().values["checks"]
        assert again[f"users{JOIN}denied{JOIN}store"] == 2
        assert again[f"users{JOIN}denied{JOIN}denied_cache"] == 2
