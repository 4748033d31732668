"""What is read of /metrics: names, labels, numbers, and what happened between two scrapes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tests.cli.answering import answering
from tollkeeper.cli.remote_service import Unanswered
from tollkeeper.cli.scrape import Watched, grown, grown_buckets, quantile_s, read

TEXT = """
# HELP tollkeeper_checks_total What each rule decided.
# TYPE tollkeeper_checks_total counter
tollkeeper_checks_total{outcome="allowed",rule="orders",source="store"} 12.0
tollkeeper_checks_total{outcome="denied",rule="orders",source="store"} 3.0
tollkeeper_checks_total{outcome="denied",rule="orders",source="denied_cache"} 4.0
tollkeeper_checks_total{outcome="denied",rule="a \\"b\\" {c}, d=\\\\",source="store"} 5.0
tollkeeper_workers 2.0
tollkeeper_rules_age_seconds NaN
tollkeeper_store_seconds_bucket{le="0.001"} 50.0
tollkeeper_store_seconds_bucket{le="+Inf"} 100.0
tollkeeper_broken{rule="x"} many
"""


def test_labels_are_told_apart_and_added_up() -> None:
    """By any of them, whatever is in their values."""
    found = read(TEXT)
    assert found.total("tollkeeper_checks_total", outcome="denied", rule="orders") == 7
    by_rule = found.by("tollkeeper_checks_total", "rule", outcome="denied")
    assert by_rule == {"orders": 7, 'a "b" {c}, d=\\': 5}
    assert found.value("tollkeeper_workers") == 2
    assert found.buckets("tollkeeper_store_seconds") == {0.001: 50, math.inf: 100}


def test_what_is_no_number_is_left_out() -> None:
    """It is as if it had not been told."""
    found = read(TEXT)
    assert found.value("tollkeeper_rules_age_seconds") is None
    assert "tollkeeper_broken" not in found.values


@given(st.text())
def test_no_text_is_too_strange(text: str) -> None:
    """It comes from another program."""
    read(text)
    read(f"name{{{text}}} 1")


class _Told(Collector):
    def __init__(self, *told: Metric) -> None:
        self._told = told

    def collect(self) -> tuple[Metric, ...]:
        return self._told


@given(st.dictionaries(st.text(max_size=20), st.integers(0, 2**50), max_size=5))
def test_prometheus_own_text_is_read_back(counts: dict[str, int]) -> None:
    """Whatever the names of rules are."""
    counter = CounterMetricFamily("checks", "Some.", labels=["rule"])
    for rule, count in counts.items():
        counter.add_metric([rule], count)
    histogram = HistogramMetricFamily("took", "Some.", [("0.5", 1.0), ("+Inf", 3.0)], 2.0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(counter, histogram))
    found = read(generate_latest(registry).decode())
    assert found.by("checks_total", "rule") == counts
    assert found.buckets("took") == {0.5: 1, math.inf: 3}


@pytest.mark.parametrize(("before", "now", "wanted"), [(3, 10, 7), (3, 3, 0), (10, 4, 4)])
def test_a_counter_that_is_lower_has_begun_anew(before: float, now: float, wanted: float) -> None:
    """The service was started again, and all that it counts has come since."""
    assert grown(before, now) == wanted


def test_a_histogram_begins_anew_as_a_whole() -> None:
    """Not range by range: a part of it may have grown beyond what it was."""
    before = {0.1: 5.0, math.inf: 9.0}
    assert grown_buckets(before, {0.1: 6.0, math.inf: 8.0}) == {0.1: 6.0, math.inf: 8.0}
    assert grown_buckets(before, {0.1: 6.0, math.inf: 11.0}) == {0.1: 1.0, math.inf: 2.0}
    assert grown_buckets({}, before) == before


@pytest.mark.parametrize(
    ("buckets", "share", "wanted"),
    [
        ({}, 0.5, None),
        ({0.001: 0.0, math.inf: 0.0}, 0.5, None),
        ({0.001: 100.0, math.inf: 100.0}, 0.5, 0.0005),
        ({0.001: 0.0, 0.002: 100.0, math.inf: 100.0}, 0.5, 0.0015),
        ({0.001: 90.0, 0.002: 90.0, 0.004: 100.0, math.inf: 100.0}, 0.95, 0.003),
        ({0.001: 10.0, math.inf: 100.0}, 0.99, 0.001),  # beyond what is measured
    ],
)
def test_quantiles(buckets: dict[float, float], share: float, wanted: float | None) -> None:
    """As Prometheus' histogram_quantile works them out."""
    found = quantile_s(buckets, share)
    assert found == (wanted if wanted is None else pytest.approx(wanted))


def test_what_is_no_tollkeeper_is_told() -> None:
    """Metrics of another program are not taken for ours."""
    for status, body in ((200, b"go_goroutines 5\n"), (404, b"not found")):
        with (
            answering(status, body) as stub,
            Watched(stub.url, None, timeout_s=5) as service,
            pytest.raises(Unanswered, match="not as Tollkeeper does"),
        ):
            service.scrape()
