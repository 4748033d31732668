"""The client of a service: its metrics. tests/cli/test_check.py tests its calls and errors."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ratekeeper.cli.service_client import (
    ServiceClient,
    ServiceError,
    bucket_growth,
    growth,
    one_line,
    quantile_s,
    read_metrics,
)
from tests.cli.stub_service import stub_service

TEXT = """
# HELP ratekeeper_checks_total What each rule decided.
# TYPE ratekeeper_checks_total counter
ratekeeper_checks_total{outcome="allowed",rule="orders",source="store"} 12.0
ratekeeper_checks_total{outcome="denied",rule="orders",source="store"} 3.0
ratekeeper_checks_total{outcome="denied",rule="orders",source="denied_cache"} 4.0
ratekeeper_checks_total{outcome="denied",rule="a \\"b\\" {c}, d=\\\\",source="store"} 5.0
ratekeeper_workers 2.0
ratekeeper_rules_age_seconds NaN
ratekeeper_store_seconds_bucket{le="0.001"} 50.0
ratekeeper_store_seconds_bucket{le="+Inf"} 100.0
"""


def test_sums_by_labels() -> None:
    """Samples are summed by any label, with any characters in its values."""
    found = read_metrics(TEXT)
    assert found.total("ratekeeper_checks_total", outcome="denied", rule="orders") == 7
    by_rule = found.by("ratekeeper_checks_total", "rule", outcome="denied")
    assert by_rule == {"orders": 7, 'a "b" {c}, d=\\': 5}
    assert found.value("ratekeeper_workers") == 2
    assert found.buckets("ratekeeper_store_seconds") == {0.001: 50, math.inf: 100}


def test_nan_is_left_out() -> None:
    """A gauge that is not known is treated as missing."""
    found = read_metrics(TEXT)
    assert found.value("ratekeeper_rules_age_seconds") is None


@given(st.text())
def test_invalid_text_is_a_value_error(text: str) -> None:
    """The text comes from another program; no other error may end the command."""
    for each in (text, f"name{{{text}}} 1", f"name {text}"):
        with suppress(ValueError):
            read_metrics(each)


class _Told(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self._metrics


@given(st.dictionaries(st.text(max_size=20), st.integers(0, 2**50), max_size=5))
def test_written_metrics_are_read_back(counts: dict[str, int]) -> None:
    """The parser returns the written counts for any rule names."""
    counter = CounterMetricFamily("checks", "Some.", labels=["rule"])
    for rule, count in counts.items():
        counter.add_metric([rule], count)
    histogram = HistogramMetricFamily("took", "Some.", [("0.5", 1.0), ("+Inf", 3.0)], 2.0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(counter, histogram))
    found = read_metrics(generate_latest(registry).decode())
    assert found.by("checks_total", "rule") == counts
    assert found.buckets("took") == {0.5: 1, math.inf: 3}


@pytest.mark.parametrize(("before", "now", "wanted"), [(3, 10, 7), (3, 3, 0), (10, 4, 4)])
def test_growth_of_a_counter(before: float, now: float, wanted: float) -> None:
    """A lower value means that the service was restarted: all of it was counted since."""
    assert growth(before, now) == wanted


def test_growth_of_a_histogram() -> None:
    """A restart resets all buckets, even if one of them has grown beyond its old value."""
    before = {0.1: 5.0, math.inf: 9.0}
    assert bucket_growth(before, {0.1: 6.0, math.inf: 8.0}) == {0.1: 6.0, math.inf: 8.0}
    assert bucket_growth(before, {0.1: 6.0, math.inf: 11.0}) == {0.1: 1.0, math.inf: 2.0}
    assert bucket_growth({}, before) == before


@pytest.mark.parametrize(
    ("buckets", "share", "wanted"),
    [
        ({}, 0.5, None),
        ({0.001: 0.0, math.inf: 0.0}, 0.5, None),
        ({0.001: 100.0, math.inf: 100.0}, 0.5, 0.0005),
        ({0.001: 0.0, 0.002: 100.0, math.inf: 100.0}, 0.5, 0.0015),
        ({0.001: 90.0, 0.002: 90.0, 0.004: 100.0, math.inf: 100.0}, 0.95, 0.003),
        ({0.001: 10.0, math.inf: 100.0}, 0.99, 0.001),  # in the last bucket
    ],
)
def test_quantiles(buckets: dict[float, float], share: float, wanted: float | None) -> None:
    """They are estimated like histogram_quantile in Prometheus."""
    found = quantile_s(buckets, share)
    assert found == (wanted if wanted is None else pytest.approx(wanted))


def test_metrics_of_another_program() -> None:
    """They are rejected, and so is text that is not in the Prometheus format."""
    for status, body in (
        (200, b"go_goroutines 5\n"),
        (404, b"not found"),
        (200, b"ratekeeper_checks many\n"),
    ):
        with (
            stub_service(status, body) as stub,
            ServiceClient(stub.url, None, timeout_s=5) as service,
            pytest.raises(ServiceError, match="not as Ratekeeper does"),
        ):
            service.metrics()


def test_one_line() -> None:
    """Text of another program is cut, put on one line, and has no terminal escapes."""
    assert one_line("a\x1b[31m\nb" + "c" * 10_000) == "a [31m b" + "c" * 492
