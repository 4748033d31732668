"""OpenTelemetry: a span around each check, and the counts as observable metrics.

    instrumented = instrument(limiter)

`check`, `evaluate` and `evaluate_all` of that limiter are replaced by functions that do the same
inside a span. Middlewares and the service call a limiter, so their checks become part of the trace
of the request. The instruments read the counts of the limiter when a reader collects them.

    observe_limiters()

reports the counts of all limiters of the process, without spans.

Attributes are bounded: rules, outcomes, numbers. They never contain a key. Messages of errors are
left out, because they may quote one.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial, wraps
from time import perf_counter
from typing import Any, Final

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import CheckResult
from ratekeeper.core.version import __version__
from ratekeeper.metrics.counters import (
    FAMILIES,
    JOIN,
    LIMITERS,
    LimiterMetrics,
    MetricFamily,
    MetricsSnapshot,
    ProcessMetrics,
)

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider
except ImportError as error:
    raise ConfigError(
        f"OpenTelemetry is not installed: pip install 'ratekeeper[otel]' ({error})"
    ) from error

SCOPE: Final = "ratekeeper"
SPAN: Final = "ratekeeper.check"
DURATION: Final = "ratekeeper.check.duration"

Attributes = Mapping[str, str | int | bool]


def configured() -> bool:
    """Return True if a provider is configured in this process."""
    providers = (trace.get_tracer_provider(), metrics.get_meter_provider())
    # The default providers do nothing, or delegate to one that is set later.
    return not all(type(each).__name__.lstrip("_").startswith(_IDLE) for each in providers)


_IDLE: Final = ("Proxy", "NoOp", "Default")


def instrument(
    limiter: Any,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Instrumented:
    """Report a limiter's checks to OpenTelemetry until `close`.

    Without providers, the global ones are used. `limiter` is a Limiter or an AsyncLimiter; create a
    middleware with it afterwards.
    """
    return Instrumented(limiter, tracer_provider, meter_provider)


def observe_limiters(*, meter_provider: MeterProvider | None = None) -> None:
    """Report the counts of all limiters of this process, present and future, without spans.

    Those of web integrations and of their routes are among them. Without a provider, the global
    one is used. Do not `instrument` a limiter with the same provider: its counts would be doubled.
    """
    _observe(metrics.get_meter(SCOPE, __version__, meter_provider), ProcessMetrics().snapshot)


def _observe(meter: Meter, read: Callable[[], MetricsSnapshot]) -> None:
    """Create an observable instrument for each family of counters and gauges."""

    def observed(family: MetricFamily, _: CallbackOptions) -> Iterable[Observation]:
        values = read().values.get(family.name, {})
        return [Observation(value, _attributes(family, labels)) for labels, value in values.items()]

    for family in FAMILIES:
        if family.kind != "histogram":
            create: Callable[..., Any] = (
                meter.create_observable_counter
                if family.kind == "counter"
                else meter.create_observable_gauge
            )
            create(f"{SCOPE}.{family.name}", [partial(observed, family)], "", family.help)


def in_callers_trace(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Wrap an ASGI application so that its spans join the trace in a request's headers."""

    async def traced(scope: Any, receive: Any, send: Any) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope.get("headers", ())
        }
        token = context.attach(propagate.extract(headers))
        try:
            await app(scope, receive, send)
        finally:
            context.detach(token)

    return traced


class Instrumented:
    """A limiter that reports to OpenTelemetry."""

    def __init__(
        self,
        limiter: Any,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
    ) -> None:
        """Use `instrument`."""
        self._limiter = limiter
        if LIMITERS.get(id(limiter)) is not limiter:
            raise ConfigError(
                f"{type(limiter).__name__} is not a limiter; "
                f"instrument a Limiter or an AsyncLimiter"
            )
        self._tracer = trace.get_tracer(SCOPE, __version__, tracer_provider)
        meter = metrics.get_meter(SCOPE, __version__, meter_provider)
        self._duration = meter.create_histogram(DURATION, "s", "How long a check took.")
        self._lock = threading.Lock()
        self._metrics = LimiterMetrics(limiter)
        self._closed = False
        _observe(meter, self._snapshot)
        self._replaced = self._replace()

    def close(self) -> None:
        """Restore the limiter and stop reporting."""
        self._closed = True
        for name, was in self._replaced.items():
            if was is None:
                delattr(self._limiter, name)
            else:
                setattr(self._limiter, name, was)
        self._replaced = {}

    def _snapshot(self) -> MetricsSnapshot:
        """Return the present counts; a metrics reader calls it in its own thread."""
        with self._lock:
            return MetricsSnapshot() if self._closed else self._metrics.snapshot()

    # ── Spans ──────────────────────────────────────────────────────────────────────────────────

    def _replace(self) -> dict[str, Any]:
        """Replace the limiter's methods; return the instance's own attributes of these names."""
        limiter = self._limiter
        verbs: dict[str, Callable[..., Any]] = {
            "check": limiter.check,
            "evaluate": limiter.evaluate,
            "evaluate_all": limiter.evaluate_all,
        }
        replaced = {name: vars(limiter).get(name) for name in verbs}
        is_async = isinstance(limiter, AbstractAsyncContextManager)
        for name, verb in verbs.items():
            setattr(limiter, name, self._traced_async(verb) if is_async else self._traced(verb))
        return replaced

    def _traced(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(verb)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._span() as span:
                answer = verb(*args, **kwargs)
                self._report(span, answer, args, kwargs)
                return answer

        return traced

    def _traced_async(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(verb)
        async def traced(*args: Any, **kwargs: Any) -> Any:
            with self._span() as span:
                answer = await verb(*args, **kwargs)
                self._report(span, answer, args, kwargs)
                return answer

        return traced

    @contextmanager
    def _span(self) -> Iterator[Span]:
        began_s = perf_counter()
        with self._tracer.start_as_current_span(
            SPAN, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except Exception as error:
                span.set_attribute("error.type", type(error).__name__)
                raise
            finally:
                self._duration.record(perf_counter() - began_s)

    def _report(self, span: Span, answer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if isinstance(answer, list):
            attributes = _of_several([each.decision for each in answer])
        else:
            attributes = _of_one(answer, args[1] if len(args) > 1 else kwargs.get("cost", 1))
        span.set_attributes(dict(attributes))


def _of_one(answer: Any, cost: int) -> Attributes:
    """Return the attributes of a Decision or a CheckResult."""
    decision = answer.decision if isinstance(answer, CheckResult) else answer
    attributes: dict[str, str | int | bool] = {
        "ratekeeper.outcome": "allowed" if decision.allowed else "denied",
        "ratekeeper.rule": decision.rule,
        "ratekeeper.degraded": decision.degraded,
        "ratekeeper.remaining": decision.remaining,
        "ratekeeper.cost": cost,
    }
    if decision.penalty is not None:
        attributes["ratekeeper.penalty"] = decision.penalty
    if answer is not decision:
        attributes["ratekeeper.kind"] = answer.kind
    return attributes


def _of_several(decisions: list[Any]) -> Attributes:
    """Return the attributes of an atomic batch: all pass, or none is charged."""
    return {
        "ratekeeper.outcome": "allowed" if all(decisions) else "denied",
        "ratekeeper.degraded": any(each.degraded for each in decisions),
        "ratekeeper.checks": len(decisions),
    }


def _attributes(family: MetricFamily, labels: str) -> Attributes:
    return dict(zip(family.labels, labels.split(JOIN), strict=True)) if family.labels else {}
