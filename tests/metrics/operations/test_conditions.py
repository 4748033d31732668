"""The conditions of the alerts on one node agree with those of Prometheus.

Both run the same tests: promtool runs `alerts_test.yaml` in `tests/integration/test_alerts.py`, and
here its series are the counters of nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.histogram import BOUNDS_NS, LENGTH
from ratekeeper.metrics import operations
from ratekeeper.metrics.counters import FAMILIES, JOIN, MetricsSnapshot
from ratekeeper.metrics.operations import conditions
from ratekeeper.metrics.operations.conditions import (
    CONDITIONS,
    HISTORY_SECONDS,
    LABELS,
    NOT_EVALUATED,
    Held,
    Sample,
    Window,
    evaluate,
    rendered,
    sample_of,
)

DESCRIBED = operations.described()
TESTS: list[dict[str, Any]] = yaml.safe_load(operations.alert_tests())["tests"]
BY_FULL_NAME = {family.full_name: family for family in FAMILIES}
Node = tuple[str, str]


def test_every_alert_is_evaluated_or_says_why_not() -> None:
    """No alert of the file is forgotten, and none is invented."""
    assert sorted([*LABELS, *NOT_EVALUATED]) == sorted(DESCRIBED)
    assert len(LABELS) == len(CONDITIONS)
    assert all(why.endswith(tuple("abcdefghijklmnopqrstuvwxyz")) for why in NOT_EVALUATED.values())


def test_the_history_is_long_enough_for_every_window() -> None:
    """No condition that is evaluated has a longer window."""
    (group,) = yaml.safe_load(operations.alerts())["groups"]
    for rule in group["rules"]:
        if rule["alert"] in LABELS and rule["alert"] != "RatekeeperKeysLost":
            for minutes in re.findall(r"\[(\d+)m\]", rule["expr"]):
                assert 60 * int(minutes) <= HISTORY_SECONDS


# ── The tests of the alerts, on nodes ──────────────────────────────────────────────────────────


def values_of(text: str) -> list[float | None]:
    """Return the values of a series in promtool's notation: `0+10x3`, `5x2`, `_x4`, `7`."""
    found: list[float | None] = []
    for part in text.split():
        start, step, times = re.fullmatch(  # type: ignore[union-attr]  # another notation is an error here
            r"(_|-?[\d.]+)(?:([+-][\d.]+))?(?:x(\d+))?", part
        ).groups()
        count = int(times) if start == "_" and times else int(times or 0) + 1
        found += [
            None if start == "_" else float(start) + number * float(step or 0)
            for number in range(count)
        ]
    return found


def series_of(test: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], list[float | None]]]:
    """Return the name, labels and values of each series of a test."""
    for series in test["input_series"]:
        name, labels = re.fullmatch(r"(\w+)\{(.*)\}", series["series"]).groups()  # type: ignore[union-attr]  # see above
        pairs = re.findall(r'(\w+)="([^"]*)"', labels)
        yield name, dict(pairs), values_of(series["values"])


def seconds_of(duration: str) -> int:
    """Return the seconds of `15s` or `8m`."""
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def put(counted: MetricsSnapshot, name: str, labels: Mapping[str, str], value: float) -> None:
    """Put a value of a series into the counters of a node."""
    if name.endswith("_bucket"):
        family = name.removeprefix("ratekeeper_").removesuffix("_bucket")
        cumulated = counted.histograms.setdefault(family, {})
        data = cumulated.setdefault(labels.get("server", ""), [0] * LENGTH)
        bound = float(labels["le"])
        place = next((at for at, ns in enumerate(BOUNDS_NS) if bound * 1e9 <= ns), LENGTH - 2)
        # The values are cumulated, and come in the order of their bounds.
        data[place] += int(value) - sum(data[:-1])
        return
    known = BY_FULL_NAME[name]
    counted.put(known.name, value, *(labels.get(each, "") for each in known.labels))


def nodes_of(test: Mapping[str, Any]) -> dict[Node, list[Sample]]:
    """Return the samples of each node of a test: its series are those of one job and instance."""
    interval_s = seconds_of(test["interval"])
    found: dict[Node, dict[int, MetricsSnapshot]] = {}
    for name, labels, values in series_of(test):
        node = found.setdefault((labels["job"], labels.get("instance", "")), {})
        for number, value in enumerate(values):
            counted = node.setdefault(number * interval_s, MetricsSnapshot())
            if value is not None:
                put(counted, name, labels, value)
    return {
        node: [sample_of(counted, float(at), float(at)) for at, counted in sorted(samples.items())]
        for node, samples in found.items()
    }


def active(
    samples: Sequence[Sample], now_s: float, thresholds: Mapping[str, float] = operations.DEFAULTS
) -> list[Held]:
    """Return the active alerts of a node at a time, as it evaluates each of its samples."""
    held: list[Held] = []
    for number, sample in enumerate(samples):
        if sample.at_s > now_s:
            break
        kept = [
            each for each in samples[: number + 1] if each.at_s >= sample.at_s - HISTORY_SECONDS
        ]
        held = evaluate(kept, held, thresholds)
    return [each for each in held if now_s - each.since_s >= DESCRIBED[each.alert].for_s]


CASES = [
    (test, check)
    for test in TESTS
    for check in test["alert_rule_test"]
    if check["alertname"] in LABELS
]


@pytest.mark.parametrize(
    ("test", "check"), CASES, ids=[f"{c['alertname']}-{c['eval_time']}" for _, c in CASES]
)
def test_a_node_has_the_alerts_that_prometheus_has(
    test: dict[str, Any], check: dict[str, Any]
) -> None:
    """With the same labels and texts. A node's durations have other ranges than the tests."""
    name = check["alertname"]
    found = {}
    for (job, instance), samples in nodes_of(test).items():
        for held in active(samples, seconds_of(check["eval_time"])):
            if held.alert == name:
                own = dict(zip(LABELS[name], held.labels.split(JOIN), strict=False))
                labels = {"job": job, "instance": instance, **own}
                shown = tuple(labels[key] for key in expected_names(test, name))
                found[shown] = rendered(DESCRIBED[name].description, labels, held.value)
    expected = {
        tuple(each["exp_labels"][key] for key in expected_names(test, name)): each[
            "exp_annotations"
        ]["description"]
        for each in check["exp_alerts"]
    }
    if "Latency" in name:
        assert found.keys() == expected.keys()
    else:
        assert found == expected


def test_the_tests_pass_with_other_thresholds() -> None:
    """As those of promtool do: each condition reads its threshold."""
    thresholds = {name: value * 0.37 for name, value in operations.DEFAULTS.items()}
    for test in yaml.safe_load(operations.alert_tests(thresholds))["tests"]:
        nodes = nodes_of(test)
        for check in test["alert_rule_test"]:
            name, now_s = check["alertname"], seconds_of(check["eval_time"])
            if name in LABELS and "Latency" not in name:  # these need the ranges of a node
                found = [
                    held
                    for samples in nodes.values()
                    for held in active(samples, now_s, thresholds)
                    if held.alert == name
                ]
                assert len(found) == len(check["exp_alerts"]), name


def expected_names(test: Mapping[str, Any], alert: str) -> list[str]:
    """Return the names of the labels that the alerts of a test have."""
    for check in test["alert_rule_test"]:
        for each in check["exp_alerts"]:
            if check["alertname"] == alert:
                return sorted(each["exp_labels"].keys() - {"severity"})
    raise AssertionError("no test expects this alert")


def test_every_condition_is_tested_to_fire_and_not_to_fire() -> None:
    """So a condition that always or never holds fails the test above."""
    for name in LABELS:
        checks = [check["exp_alerts"] for _, check in CASES if check["alertname"] == name]
        assert any(checks), name
        assert any(not each for each in checks), name


# ── Ends, edges and faults ─────────────────────────────────────────────────────────────────────


def sample(at_s: float, **values: float | dict[str, float]) -> Sample:
    """Return a sample with these values, by family."""
    counted = MetricsSnapshot()
    for family, given_values in values.items():
        by_labels = given_values if isinstance(given_values, dict) else {"": given_values}
        counted.values[family] = dict(by_labels)
    return sample_of(counted, at_s, at_s)


@pytest.mark.parametrize("name", sorted(LABELS))
def test_an_alert_ends(name: str) -> None:
    """All values are as usual for 15 minutes after the condition held."""
    test, check = next(
        (test, check) for test, check in CASES if check["alertname"] == name and check["exp_alerts"]
    )
    end_s = seconds_of(check["eval_time"])
    for samples in nodes_of(test).values():
        held = [each for each in active(samples, end_s) if each.alert == name]
        if not held:
            continue
        kept = [each for each in samples if each.at_s <= end_s]
        first, last = samples[0].counted, kept[-1].counted
        # Counters stand still, and gauges have their first value again.
        usual = MetricsSnapshot(histograms=last.histograms)
        for family, values in last.values.items():
            is_counter = conditions_kind(family) == "counter" or family.endswith("since_seconds")
            usual.values[family] = values if is_counter else dict.fromkeys(values, 0.0)
            if not is_counter and family in ("store_states_max", "start_time_seconds"):
                usual.values[family] = first.values[family]
        at_s = end_s
        for _ in range(62):
            at_s += 15
            kept = [*kept, Sample(at_s, at_s, usual)]
            kept = [each for each in kept if each.at_s >= at_s - HISTORY_SECONDS]
            held = evaluate(kept, held)
        assert not [each for each in held if each.alert == name]
        return
    raise AssertionError("no node has this alert")


def conditions_kind(family: str) -> str:
    """Return whether a family is a counter or a gauge."""
    return next(each.kind for each in FAMILIES if each.name == family)


def test_since_is_the_time_when_the_condition_began() -> None:
    """It stays while the condition holds, and begins again after an end."""
    held: list[Held] = []
    seen = []
    for at_s, age_s in [(0, 5), (10, 70), (20, 90), (30, 5), (40, 61)]:
        held = evaluate([sample(at_s, rules_age_seconds=age_s)], held)
        seen.append([(each.since_s, each.value) for each in held])
    assert seen == [[], [(10, 70)], [(10, 90)], [], [(40, 61)]]


def test_a_threshold_is_not_exceeded_by_itself() -> None:
    """Conditions say `more than`."""
    for value, alerts in ((60.0, []), (60.1, ["RatekeeperRulesStale"])):
        held = evaluate([sample(0, rules_age_seconds=value)], [])
        assert [each.alert for each in held] == alerts


def test_other_thresholds_count() -> None:
    """The table takes them as an argument, as the printed alerts do."""
    samples = [sample(0, rules_age_seconds=10)]
    assert evaluate(samples, [], {**operations.DEFAULTS, "rules_age": 5})


def test_a_counter_that_is_new_has_grown_from_zero() -> None:
    """The first forged datagram is an alert; the evictions before our start are none."""
    samples = [
        sample(0, checks={"allowed": 0}),
        sample(10, gossip_drops={"forged": 1}, store_keys_evicted={"h:1": 900}, degraded_checks=6),
    ]
    assert {each.alert for each in evaluate(samples, [])} == {
        "RatekeeperGossipForged",
        "RatekeeperDegraded",
    }
    later = [*samples, sample(20, store_keys_evicted={"h:1": 901})]
    assert [(each.alert, each.value) for each in evaluate(later, [])] == [
        ("RatekeeperKeysEvicted", 1)
    ]


def test_a_server_that_restarts_counts_its_evictions_from_zero() -> None:
    """The increase is never negative."""
    samples = [
        sample(0, store_keys_evicted={"h:1": 900}),
        sample(10, store_keys_evicted={"h:1": 2}),
    ]
    (held,) = evaluate(samples, [])
    assert (held.alert, held.labels, held.value) == ("RatekeeperKeysEvicted", "h:1", 2)


family_values = st.dictionaries(
    st.sampled_from(["", "denied", "allowed", "h:1", f"eu{JOIN}us", "forged", "answered"]),
    st.floats(0, 1e12) | st.integers(0, 10**6),
    max_size=4,
)


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 1e4),
            st.dictionaries(st.sampled_from(conditions._VALUES), family_values, max_size=6),
            st.dictionaries(
                st.sampled_from(conditions._HISTOGRAMS),
                st.dictionaries(
                    st.sampled_from(["", "h:1"]),
                    st.lists(st.integers(0, 100), min_size=LENGTH, max_size=LENGTH),
                    max_size=2,
                ),
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_no_counters_break_the_evaluation(
    given_samples: list[tuple[float, dict[str, dict[str, float]], dict[str, dict[str, list[int]]]]],
) -> None:
    """Whatever appears, vanishes, restarts or is missing; times never come from the future."""
    held: list[Held] = []
    samples: list[Sample] = []
    at_s = 0.0
    for passed_s, values, histograms in given_samples:
        at_s += passed_s
        samples.append(sample_of(MetricsSnapshot(values, histograms), at_s, at_s))
        held = evaluate(samples, held)
        assert all(each.since_s <= at_s and each.value >= 0 for each in held)
        assert len({(each.alert, each.labels) for each in held}) == len(held)


def test_a_rate_before_five_minutes_have_passed_is_that_of_five_minutes() -> None:
    """As in Prometheus: the first second of a service raises no alarm."""
    window = Window([sample(0, checks={"denied": 0}), sample(1, checks={"denied": 300})])
    assert window.increase("checks", 300) == {"denied": 300}
    assert not evaluate([sample(0), sample(1, checks={"denied": 299, "allowed": 1})], [])


def test_every_text_can_be_rendered() -> None:
    """No field of a template is left."""
    labels = dict.fromkeys(("job", "instance", "rule", "server", "kind", "region", "peer"), "name")
    for each in DESCRIBED.values():
        for text in (each.summary, each.description):
            assert "{{" not in rendered(text, labels, 1.5)
