"""Metrics: their names, sums over several processes, and totals that never go down."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from weakref import WeakValueDictionary

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Fleet, Limiter, Request
from ratekeeper.control.follow import Follower
from ratekeeper.core.histogram import LENGTH
from ratekeeper.core.model import ResultKind
from ratekeeper.decide.decider import lost
from ratekeeper.decide.fleet_monitor import NodeAnswers
from ratekeeper.decide.region_monitor import LinkStatus, PeerCounts
from ratekeeper.decide.regional import REGIONS_MAX
from ratekeeper.limiter.setup import LimiterSetup
from ratekeeper.metrics import counters
from ratekeeper.metrics.counters import (
    BY_NAME,
    FAMILIES,
    JOIN,
    LIMITERS,
    OTHERS,
    Counters,
    FleetMetrics,
    LimiterMetrics,
    MetricsSnapshot,
    ProcessMetrics,
    RuleTotals,
    regions_snapshot,
)
from ratekeeper.testing import ManualClock
from tests.fleet.nodes import SharedStore
from tests.stub_fleet import StubFleet, store_with_fleet
from tests.stub_regions import EU, StubRegions, store_with_regions

LABELS = {
    *("rule", "algorithm", "endpoint", "outcome", "source"),
    *("route", "status", "code", "kind", "server", "version"),
    *("consistency", "state", "direction", "reason", "region", "peer"),
}
# The labels of the rule below, before outcome and source.
USERS = JOIN.join(("users", "token_bucket", "*"))
RULES: dict[str, Any] = {
    "version": 1,
    "rules": [{"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["2/minute"]}],
    "deny": ["api_key:bad"],
}


def snapshot(**values: float) -> MetricsSnapshot:
    """Return a snapshot with one value of each family, without labels."""
    found = MetricsSnapshot()
    for name, value in values.items():
        found.put(name, value)
    return found


def test_names_follow_the_conventions_of_prometheus() -> None:
    """Names are lower case and end with a full unit name; no label is a key."""
    assert len(BY_NAME) == len(FAMILIES)
    for family in FAMILIES:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
        assert family.help.endswith(".")
        assert family.full_name.endswith("_total") == (family.kind == "counter")
        assert set(family.labels) <= LABELS


def test_the_documentation_lists_every_metric() -> None:
    """Each has exactly its declared labels."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(ratekeeper_\w+)` \| ([a-z, ]*)\|", page, re.MULTILINE)
    documented = {name: tuple(filter(None, labels.strip().split(", "))) for name, labels in rows}
    assert documented == {family.full_name: family.labels for family in FAMILIES}


def test_counters_are_added_and_the_worst_gauge_is_reported() -> None:
    """Each family is merged in its own way; values of only one process stay."""
    one = snapshot(denied_cache_hits=3, rules_age_seconds=1.5, start_time_seconds=100)
    one.histograms["decision_seconds"] = {"": [1] * LENGTH}
    other = snapshot(denied_cache_hits=4, rules_age_seconds=9.5, start_time_seconds=90)
    other.put("penalties", 2, "users", "block")
    other.histograms["decision_seconds"] = {"": [2] * LENGTH}
    one.add(other)
    assert one.values == {
        "denied_cache_hits": {"": 7},
        "rules_age_seconds": {"": 9.5},
        "start_time_seconds": {"": 90},
        "penalties": {f"users{JOIN}block": 2},
    }
    assert one.histograms == {"decision_seconds": {"": [3] * LENGTH}}


def test_data_of_another_release_is_left_out() -> None:
    """An unknown family, or a histogram with other ranges, changes nothing."""
    one = snapshot(denied_cache_hits=1)
    other = snapshot(of_the_future=1)
    other.histograms = {"decision_seconds": {"": [1, 2]}, "of_the_future": {"": [1] * LENGTH}}
    one.add(other)
    assert one.values == snapshot(denied_cache_hits=1).values
    assert not any(one.histograms.values())


def test_only_the_counts_of_a_dead_worker_remain() -> None:
    """The age of its rules does not matter any more; its start time does."""
    gone = snapshot(denied_cache_hits=3, rules_age_seconds=99, start_time_seconds=100)
    assert gone.lasting() == snapshot(denied_cache_hits=3, start_time_seconds=100)


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 9), st.integers(0, 9))),
        max_size=8,
    )
)
def test_counts_by_rule_never_go_down(seen: list[dict[str, tuple[int, ...]]]) -> None:
    """This holds while rules are added, removed and compiled again."""
    lasting = RuleTotals()
    totals: dict[str, list[int]] = {}
    for now in seen:
        lasting.update(now)
        for rule, row in [*totals.items(), *now.items()]:
            assert all(n >= was for n, was in zip(lasting.totals[rule], row, strict=True))
        totals = {rule: list(total) for rule, total in lasting.totals.items()}


def test_a_removed_rule_keeps_its_counts() -> None:
    """They continue from there when it returns."""
    lasting = RuleTotals()
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


def test_the_number_of_rule_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rules are reported together, and no rule changes its name."""
    monkeypatch.setattr(counters, "RULES_MAX", 2)
    lasting = RuleTotals()
    lasting.update({"a": (1,)})
    lasting.update({"d": (100,), "c": (10,), "b": (1,), "a": (1,)})
    assert lasting.totals == {"a": [1], "d": [100], "(others)": [11]}


def test_counts_of_the_service() -> None:
    """It counts requests by route and status, calls by code, and durations of checks."""
    own = Counters()
    own.requests["/v1/check", 200] = 3
    own.grpc_requests["OK"] = 2
    own.decision_seconds.note(1)
    found = own.snapshot()
    assert found.values == {
        "degraded_checks": {"": 0},
        "requests": {f"/v1/check{JOIN}200": 3},
        "grpc_requests": {"OK": 2},
    }
    assert sum(found.histograms["decision_seconds"][""][:-1]) == 1


def test_the_counts_of_a_limiter_are_read() -> None:
    """Checks are counted by rule, outcome and source; lists and the rules' status are included."""
    with Limiter.from_rules(RULES, clock=ManualClock()) as limiter:
        for _ in range(3):
            limiter.check(Request(user="1"))
        limiter.check(Request(api_key="bad"))
        found = LimiterMetrics(limiter).snapshot()
    assert found.values["checks"] == {
        "allowed": 2,
        "denied": 1,
        "blocked": 1,
        "unavailable": 0,
        "failed": 0,
    }
    assert found.values["rule_decisions"] == {
        f"{USERS}{JOIN}allowed{JOIN}store": 2,
        f"{USERS}{JOIN}denied{JOIN}store": 1,
    }
    assert found.values["rules_failing"] == {"": 0}
    assert found.values["rules_load_errors"] == {"": 0}
    assert "breaker_state" not in found.values
    assert found.histograms["store_seconds"] == {}


def test_a_limiter_without_rules_can_be_read() -> None:
    """It is reported as one rule with its name, and has nothing that only rules have."""
    with Limiter("2/minute", name="api") as limiter:
        for _ in range(3):
            limiter.check("k")
        values = LimiterMetrics(limiter).snapshot().values
    assert values["rule_decisions"] == {
        JOIN.join(("api", "token_bucket", "*", "allowed", "store")): 2,
        JOIN.join(("api", "token_bucket", "*", "denied", "store")): 1,
    }
    assert values["checks"] == {
        "allowed": 2,
        "denied": 1,
        "unavailable": 0,
        "failed": 0,
    }
    assert not {"rules_info", "busiest_subject_rate"} & set(values)


def _of_name(name: str, found: MetricsSnapshot) -> dict[str, float]:
    decisions = found.values["rule_decisions"]
    return {labels: count for labels, count in decisions.items() if labels.startswith(name + JOIN)}


def test_all_limiters_of_a_process_are_read_together() -> None:
    """Limiters with the same labels are added, and a deleted one keeps its last counts."""
    reading = ProcessMetrics()
    first, second = (Limiter("1/minute", name="together") for _ in range(2))
    first.check("k")
    second.check("k")
    second.check("k")
    expected = {
        JOIN.join(("together", "token_bucket", "*", "allowed", "store")): 2,
        JOIN.join(("together", "token_bucket", "*", "denied", "store")): 1,
    }
    assert _of_name("together", reading.snapshot()) == expected
    second.close()
    del second
    gc.collect()
    assert not [each for each in LIMITERS.values() if each.name == "together" and each is not first]
    assert _of_name("together", reading.snapshot()) == expected
    first.check("k")
    assert sum(_of_name("together", reading.snapshot()).values()) == 4


def test_lost_charges_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decider counts them for all limiters together."""
    limiters = [Limiter("1/minute"), Limiter("2/minute")]
    monkeypatch.setattr(lost, "unknown", 3)
    monkeypatch.setattr(lost, "returns", 2)
    found = ProcessMetrics().snapshot().values["lost_charges"]
    assert found == {"unknown": 3, "return": 2}
    for limiter in limiters:
        limiter.close()


def test_a_node_whose_limiter_is_closed_can_be_read() -> None:
    """An application may keep a limiter that it has closed. A scrape must not fail."""
    clock = ManualClock(1_000)
    limiter = Limiter(
        "10000/hour", store=SharedStore(clock), clock=clock, consistency="leased", fleet=Fleet()
    )
    limiter.check("k")
    reading = ProcessMetrics()
    reading.snapshot()
    limiter.close()
    limiter.fleet._stats = None  # type: ignore[union-attr]  # as if a second had passed
    assert reading.snapshot().values["fleet_checks"]


def test_metrics_read_no_limiter_that_is_still_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be scraped while a limiter waits for its rules."""
    found: list[set[int]] = []
    prepare = Follower.__init__

    def scraped_before(follower: Follower, limiter: LimiterSetup, *arguments: Any) -> None:
        found.append({id(limiter)} & set(LIMITERS))
        ProcessMetrics().snapshot()
        prepare(follower, limiter, *arguments)

    monkeypatch.setattr(Follower, "__init__", scraped_before)
    with Limiter.from_rules(RULES) as limiter:
        assert found == [set()]
        assert LIMITERS[id(limiter)] is limiter


def test_a_store_that_limiters_share_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters are those of the store, not of each limiter."""
    store = _RemoteStore()
    limiters = [Limiter("1/minute", name=name) for name in ("a", "b")]
    for limiter in limiters:
        limiter._store = store  # type: ignore[assignment]  # only its monitor is read
    monkeypatch.setattr(
        "ratekeeper.metrics.counters.LIMITERS",
        WeakValueDictionary({id(limiter): limiter for limiter in limiters}),
    )
    assert ProcessMetrics().snapshot().values["denied_cache_hits"] == {"": 11}


def test_the_labels_of_all_limiters_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limiters after the first ones share a name, and their counts are added."""
    monkeypatch.setattr("ratekeeper.metrics.counters.RULES_MAX", 2)
    limiters = [Limiter("1/minute", name=f"l{number}") for number in range(5)]
    monkeypatch.setattr(
        "ratekeeper.metrics.counters.LIMITERS",
        WeakValueDictionary({id(limiter): limiter for limiter in limiters}),
    )
    for limiter in limiters:
        limiter.check("k")
    reading = ProcessMetrics()
    for _ in range(2):
        assert reading.snapshot().values["rule_decisions"] == {
            JOIN.join(("l0", "token_bucket", "*", "allowed", "store")): 1,
            JOIN.join(("l1", "token_bucket", "*", "allowed", "store")): 1,
            JOIN.join((OTHERS, "", "", "allowed", "store")): 3,
        }


def test_outcomes_without_a_rule_are_kinds_of_results() -> None:
    """Metrics and results use the same words."""
    assert {"unlimited", "exempt", "blocked"} < set(get_args(ResultKind))


class _RemoteStore:
    """A store that counts and has breakers, as one in Redis does."""

    def __init__(self) -> None:
        self.hits = {"users": 2, "trial": 9}
        self.monitor = self
        self.is_local = False

    def counters(self) -> dict[str, int]:
        return {"denied_cache_hits": 11, "coalesced_checks": 7}

    def denied_by_rule(self) -> dict[str, int]:
        return self.hits

    def close(self) -> None:
        """Do nothing; the limiter calls it, because it opened the store."""

    def latencies(self) -> dict[str, list[int]]:
        return {"h:1": [1] * LENGTH}

    def breakers(self) -> list[Any]:
        return [
            SimpleNamespace(address="h:1", state="open", opened_times=3, failed_calls=9),
            SimpleNamespace(address="h:2", state="closed", opened_times=0, failed_calls=1),
        ]


def test_the_counts_of_a_remote_store_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its breakers by server; denials from the cache apart from the others."""
    with Limiter.from_rules(RULES, clock=ManualClock()) as limiter:
        for _ in range(5):
            limiter.check(Request(user="1"))
        remote = _RemoteStore()
        monkeypatch.setattr(limiter, "_store", remote)
        reading = LimiterMetrics(limiter)
        assert reading.snapshot().histograms["store_seconds"] == {"h:1": [1] * LENGTH}
        reading = LimiterMetrics(limiter)
        found = reading.snapshot().values
        assert found["rule_decisions"] == {
            f"{USERS}{JOIN}allowed{JOIN}store": 2,
            f"{USERS}{JOIN}denied{JOIN}store": 1,
            f"{USERS}{JOIN}denied{JOIN}denied_cache": 2,
        }
        assert found["breaker_state"] == {"h:1": 2, "h:2": 0}
        assert found["server_failures"] == {"h:1": 9, "h:2": 1}
        assert found["breaker_opened"] == {"h:1": 3, "h:2": 0}
        assert found["denied_cache_hits"] == {"": 11}
        assert found["coalesced_checks"] == {"": 7}
        remote.hits["users"] = 30  # in shadow mode, or for another rule of the same requests
        assert reading.snapshot().values["rule_decisions"] == found["rule_decisions"]
        limiter.check(Request(user="1"))  # decided by the store
        again = reading.snapshot().values["rule_decisions"]
        assert again[f"{USERS}{JOIN}denied{JOIN}store"] == 2
        assert again[f"{USERS}{JOIN}denied{JOIN}denied_cache"] == 2


def test_the_counts_of_a_fleet_are_read() -> None:
    """Answers by rule, the table, the reports, the nodes and the gossip of this process."""
    with Limiter("2/minute", store=store_with_fleet()) as limiter:
        found = LimiterMetrics(limiter).snapshot()
    assert found.values["fleet_checks"] == {
        JOIN.join(("users", "leased", "allowed")): 80,
        JOIN.join(("users", "leased", "denied")): 5,
        JOIN.join(("users", "leased", "asked")): 15,
        JOIN.join(("default", "eventual", "allowed")): 3,
        JOIN.join(("default", "eventual", "asked")): 1,
    }
    assert {name: value[""] for name, value in found.values.items() if name in _OF_FLEET} == {
        **_OF_FLEET
    }
    assert found.values["fleet_reports"] == {"answered": 4, "failed": 1}
    assert found.values["fleet_nodes"] == {"alive": 2, "suspected": 1, "dead": 0}
    assert found.values["gossip_messages"] == {"sent": 10, "received": 20}
    assert found.values["gossip_bytes"] == {"sent": 1_000, "received": 2_000}
    assert found.values["gossip_drops"] == {"authentication": 3}
    assert found.histograms["fleet_flush_seconds"] == {"": [1, *[0] * (LENGTH - 2), 1]}
    assert found.histograms["gossip_hint_seconds"] == {"": [1] * LENGTH}


_OF_FLEET = {
    "fleet_allowances": 40,
    "fleet_allowances_max": 100_000,
    "fleet_allowances_refused": 2,
    "fleet_leased_units": 350,
    "fleet_pending_units": 6,
    "fleet_returned_units": 7,
    "fleet_charged_units": 9,
    "fleet_lost_units": 3,
    "fleet_divergence_units": 2,
    "fleet_live_nodes": 3,
    "fleet_registered_nodes": 3,
    "gossip_lag_seconds": 6.5,
}


def test_a_process_without_gossip_has_no_counts_of_it() -> None:
    """Only one process of a node runs gossip. A dead node has no lag."""
    fleet = StubFleet()
    fleet.gossiped = None
    fleet.known = [replace(each, state="dead") for each in fleet.known]
    found = FleetMetrics(fleet).snapshot()
    assert not {"gossip_messages", "gossip_drops"} & set(found.values)
    assert found.values["gossip_lag_seconds"] == {"": 0}


def test_the_rules_of_a_fleet_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rules are counted together, and no counter goes down when a rule is gone."""
    monkeypatch.setattr(counters, "RULES_MAX", 1)
    fleet = StubFleet()
    reading = FleetMetrics(fleet)
    fleet.counted = {("a", "leased"): NodeAnswers(allowed=1)}
    reading.snapshot()
    fleet.counted = {(name, "leased"): NodeAnswers(allowed=2) for name in "bc"}
    assert reading.snapshot().values["fleet_checks"] == {
        JOIN.join(("a", "leased", "allowed")): 1,
        JOIN.join((OTHERS, "", "allowed")): 4,
    }


def test_a_fleet_that_limiters_share_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters are those of the node, not of each limiter."""
    store = store_with_fleet()
    limiters = [Limiter("1/minute", store=store, name=name) for name in ("a", "b")]
    monkeypatch.setattr(
        "ratekeeper.metrics.counters.LIMITERS",
        WeakValueDictionary({id(limiter): limiter for limiter in limiters}),
    )
    assert ProcessMetrics().snapshot().values["fleet_returned_units"] == {"": 7}


def test_the_regions_are_read() -> None:
    """The leader has the links and the backlog; the labels are names of regions."""
    with Limiter("2/minute", store=store_with_regions()) as limiter:
        found = LimiterMetrics(limiter).snapshot()
    of_regions = {
        name: values for name, values in found.values.items() if name.startswith("region_")
    }
    us, ap = JOIN.join(("eu", "us")), JOIN.join(("eu", "ap"))
    assert of_regions == {
        "region_leader": {"eu": 1},
        "region_share": {"eu": 0.4},
        "region_backlog": {"eu": 12},
        "region_unaccepted_units": {"eu": 40},
        "region_link_state": {us: 0, ap: 1},
        "region_lag_seconds": {us: 0.25, ap: 8.5},
        "region_reports": {
            f"{us}{JOIN}accepted": 9,
            f"{us}{JOIN}pending": 2,
            f"{us}{JOIN}failed": 1,
            f"{ap}{JOIN}accepted": 0,
            f"{ap}{JOIN}pending": 0,
            f"{ap}{JOIN}failed": 30,
        },
        "region_bytes": {
            f"{us}{JOIN}sent": 1_000,
            f"{us}{JOIN}received": 300,
            f"{ap}{JOIN}sent": 50,
            f"{ap}{JOIN}received": 0,
        },
        "region_excess_units": {us: 7, ap: 0},
    }
    assert found.histograms["region_sync_seconds"] == {us: [1] * LENGTH, ap: [0] * LENGTH}


def test_a_process_that_does_not_lead_knows_no_links() -> None:
    """A gauge of an old leader would hide that of the new one."""
    regions = StubRegions()
    regions.leads = False
    found = regions_snapshot(regions).values
    assert found["region_leader"] == {"eu": 0}
    assert not {"region_link_state", "region_lag_seconds", "region_backlog"} & set(found)


def test_the_labels_of_regions_are_bounded() -> None:
    """A table of regions that is too long adds no series."""
    regions = StubRegions()
    regions.exchanged = {f"r{number}": PeerCounts() for number in range(100)}
    regions.known = [replace(EU, links=tuple(LinkStatus(f"r{n}", "up") for n in range(100)))]
    found = regions_snapshot(regions).values
    assert len(found["region_excess_units"]) == REGIONS_MAX
    assert len(found["region_link_state"]) == REGIONS_MAX
