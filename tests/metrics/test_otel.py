"""OpenTelemetry with its SDK: checks are spans, counts are metrics, and neither has a key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ratekeeper import AsyncLimiter, Limiter, Request
from ratekeeper.asgi import RateLimit
from ratekeeper.core.errors import ConfigError, InvalidKey
from ratekeeper.metrics.otel import Instrumented, instrument, observe_limiters
from tests.web.asgi_driver import ask, hello

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [{"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["2/minute"]}],
    "allow": ["api_key:good"],
}
SECRET = "a-secret-key"


class Exported:
    """A tracer and a meter whose output is in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def instrument(self, limiter: Any) -> Instrumented:
        """Instrument this limiter."""
        return instrument(limiter, tracer_provider=self.tracers, meter_provider=self.meters)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Return the spans that have ended."""
        return list(self.exporter.get_finished_spans())

    def metrics(self) -> dict[str, dict[tuple[Any, ...], Any]]:
        """Return the values by name and attribute values."""
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: {
                tuple((point.attributes or {}).values()): getattr(point, "value", point)
                for point in metric.data.data_points
            }
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def exported() -> Iterator[Exported]:
    """An exporter in memory, shut down after the test."""
    made = Exported()
    yield made
    made.tracers.shutdown()
    made.meters.shutdown()


def test_a_check_is_a_span(exported: Exported) -> None:
    """It has the rule, the outcome and the numbers; each method makes one span."""
    with Limiter.from_rules(RULES) as limiter:
        instrumented = exported.instrument(limiter)
        limiter.check(Request(user=SECRET))
        limiter.evaluate(Request(user=SECRET), 1)
        limiter.evaluate(Request(user=SECRET), cost=1)
        limiter.evaluate(Request(api_key="good"))
        limiter.evaluate_all([(Request(user="2"), 1), (Request(user="3"), 1)])
        limiter.peek(Request(user=SECRET))
        found = [dict(span.attributes or {}) for span in exported.spans]
        assert [span.name for span in exported.spans] == ["ratekeeper.check"] * 5
        denied = {
            "ratekeeper.outcome": "denied",
            "ratekeeper.rule": "users",
            "ratekeeper.degraded": False,
            "ratekeeper.remaining": 0,
            "ratekeeper.cost": 1,
            "ratekeeper.kind": "limited",
        }
        assert found[2] == denied
        assert found[3]["ratekeeper.kind"] == "exempt"
        assert found[4] == {
            "ratekeeper.outcome": "allowed",
            "ratekeeper.degraded": False,
            "ratekeeper.checks": 2,
        }
        instrumented.close()
        limiter.check(Request(user=SECRET))
        assert len(exported.spans) == 5


def test_counts_are_metrics(exported: Exported) -> None:
    """They are the counts of the rules and the durations of checks."""
    with Limiter.from_rules(RULES) as limiter:
        instrumented = exported.instrument(limiter)
        for _ in range(3):
            limiter.check(Request(user=SECRET))
        found = exported.metrics()
        assert found["ratekeeper.checks"][("allowed",)] == 2
        assert found["ratekeeper.checks"][("denied",)] == 1
        assert found["ratekeeper.rule_decisions"] == {
            ("users", "token_bucket", "*", "allowed", "store"): 2,
            ("users", "token_bucket", "*", "denied", "store"): 1,
        }
        assert found["ratekeeper.rules_failing"] == {(): 0}
        assert found["ratekeeper.check.duration"][()].count == 3
        instrumented.close()
        assert "ratekeeper.checks" not in exported.metrics()


async def test_async_checks_are_spans(exported: Exported) -> None:
    """The span is current during the store call, so spans of the store are its children."""
    async with AsyncLimiter.from_rules(RULES) as limiter:
        exported.instrument(limiter)
        with exported.tracers.get_tracer("test").start_as_current_span("request") as request:
            await limiter.check(Request(user="1"))
            await limiter.evaluate(Request(user="1"))
            await limiter.evaluate_all([(Request(user="1"), 1)])
        outcomes = [
            (span.attributes or {}).get("ratekeeper.outcome")
            for span in exported.spans
            if span.parent is not None and span.parent.span_id == request.get_span_context().span_id
        ]
        assert outcomes == ["allowed", "allowed", "denied"]


@pytest.mark.parametrize("name", ["", "api"])
def test_a_limiter_without_rules_is_reported(name: str, exported: Exported) -> None:
    """`evaluate` makes one span, and the checks have the limiter's name."""
    with Limiter("2/minute", name=name) as limiter:
        instrumented = exported.instrument(limiter)
        limiter.evaluate("k")
        limiter.check("k")
        limiter.evaluate_all([("k", 1), ("l", 1)])
        assert len(exported.spans) == 3
        found = exported.metrics()
        assert found["ratekeeper.checks"] == {
            ("allowed",): 3,
            ("denied",): 1,
            ("unavailable",): 0,
            ("failed",): 0,
        }
        assert found["ratekeeper.rule_decisions"] == {
            (name or "default", "token_bucket", "*", "allowed", "store"): 3,
            (name or "default", "token_bucket", "*", "denied", "store"): 1,
        }
        instrumented.close()
        limiter.check("k")
        assert len(exported.spans) == 3


async def test_checks_of_a_middleware_join_the_trace_of_the_request(exported: Exported) -> None:
    """The limiter is instrumented before the middleware is created."""
    async with AsyncLimiter("2/minute") as limiter:
        exported.instrument(limiter)
        app = RateLimit(hello, limiter=limiter)
        with exported.tracers.get_tracer("test").start_as_current_span("request") as request:
            statuses = [(await ask(app)).status for _ in range(3)]
        assert statuses == [200, 200, 429]
        parents = [span.parent.span_id for span in exported.spans if span.parent is not None]
        assert parents == [request.get_span_context().span_id] * 3


def test_all_limiters_of_a_process_are_observed(exported: Exported) -> None:
    """Limiters that are made later are among them, and no check is a span."""
    observe_limiters(meter_provider=exported.meters)
    with Limiter("1/minute", name="observed") as limiter:
        limiter.check("k")
        limiter.check("k")
        found = exported.metrics()["ratekeeper.rule_decisions"]
    assert {labels: count for labels, count in found.items() if labels[0] == "observed"} == {
        ("observed", "token_bucket", "*", "allowed", "store"): 1,
        ("observed", "token_bucket", "*", "denied", "store"): 1,
    }
    assert not exported.spans


def test_no_key_is_exported(exported: Exported) -> None:
    """Neither spans nor metrics contain it, even if an error quotes it."""
    with Limiter("2/minute") as limiter:
        exported.instrument(limiter)
        limiter.check(SECRET)
        with pytest.raises(InvalidKey):
            limiter.check(SECRET * 1_000)
        text = "".join(span.to_json() for span in exported.spans) + str(exported.metrics())
        assert SECRET not in text
        assert (exported.spans[-1].attributes or {})["error.type"] == "InvalidKey"
        assert not exported.spans[-1].events


def test_only_limiters_can_be_instrumented(exported: Exported) -> None:
    """The error names the right classes."""
    with pytest.raises(ConfigError, match="instrument a Limiter"):
        exported.instrument(object())


def test_opentelemetry_is_imported_only_on_request() -> None:
    """Neither the library nor a worker of the service imports it."""
    script = """
import sys
import ratekeeper, ratekeeper.service.process.worker
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


def test_configured_detects_a_provider() -> None:
    """The default providers do not count."""
    script = """
from ratekeeper.metrics.otel import configured
print(configured())
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
print(configured())
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == ["False", "True"]
