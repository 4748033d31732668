"""OpenTelemetry: a span around each check, and what is counted as observable metrics.

    instrumented = instrument(limiter)

A limiter's `check`, `evaluate` and `evaluate_all` are replaced, on that limiter alone, by ones
that do the same inside a span. Middlewares and the service ask through a limiter, so their checks
become part of the trace of the request. Nothing is counted twice: the instruments read
what rules count anyway, when somebody collects. Only a limiter without rules, which counts nothing,
is counted here.

Attributes are bounded: rules, outcomes, numbers. Never a key: what an error says is left out too,
for it may quote one.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from time import perf_counter
from typing import Any, Final

from tollkeeper.core.errors import ConfigError
from tollkeeper.core.version import __version__
from tollkeeper.metrics.counters import FAMILIES, JOIN, Family, Reading, Snapshot

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider
except ImportError as error:
    raise ConfigError(
        f"OpenTelemetry is not installed: pip install 'tollkeeper[otel]' ({error})"
    ) from error

SCOPE: Final = "tollkeeper"
SPAN: Final = "tollkeeper.check"
DURATION: Final = "tollkeeper.check.duration"
# What a limiter goes by that has no name.
_DEFAULT: Final = "default"

Attributes = Mapping[str, str | int | bool]


def configured() -> bool:
    """Has somebody configured a provider in this process?"""
    providers = (trace.get_tracer_provider(), metrics.get_meter_provider())
    # Those that there are by default do nothing, or wait for a real one.
    return not all(type(each).__name__.lstrip("_").startswith(_IDLE) for each in providers)


_IDLE: Final = ("Proxy", "NoOp", "Default")


def instrument(
    limiter: Any,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Instrumented:
    """Tell OpenTelemetry of a limiter's checks, until `close`; by default the global providers.

    `limiter` is a Limiter or an AsyncLimiter; a middleware is made with it afterwards.
    """
    return Instrumented(limiter, tracer_provider, meter_provider)


def in_callers_trace(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The ASGI application, whose spans belong to the trace that a request's headers name."""

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
    """A limiter that OpenTelemetry is told of."""

    def __init__(
        self,
        limiter: Any,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
    ) -> None:
        """Use `instrument`."""
        self._limiter = limiter
        self._ruled = _has_rules(limiter)
        self._tracer = trace.get_tracer(SCOPE, __version__, tracer_provider)
        meter = metrics.get_meter(SCOPE, __version__, meter_provider)
        self._duration = meter.create_histogram(DURATION, "s", "How long a check took.")
        self._lock = threading.Lock()
        self._reading = Reading(limiter)
        # Of a limiter without rules: its checks by outcome and source.
        self._own: dict[tuple[str, str], int] = {}
        self._closed = False
        for family in FAMILIES:
            if family.kind != "histogram":
                self._observe(meter, family)
        self._replaced = self._replace()

    def close(self) -> None:
        """The limiter is as it was; nothing is told any more."""
        self._closed = True
        for name, was in self._replaced.items():
            if was is None:
                delattr(self._limiter, name)
            else:
                setattr(self._limiter, name, was)
        self._replaced = {}

    # ── Metrics ────────────────────────────────────────────────────────────────────────────────

    def _observe(self, meter: Meter, family: Family) -> None:
        create: Callable[..., Any] = (
            meter.create_observable_counter
            if family.kind == "counter"
            else meter.create_observable_gauge
        )
        create(f"{SCOPE}.{family.name}", [partial(self._observed, family)], "", family.help)

    def _observed(self, family: Family, _: CallbackOptions) -> Iterable[Observation]:
        """Called when somebody collects, in their thread."""
        if self._closed:
            return []
        values = self._snapshot().values.get(family.name, {})
        return [Observation(value, _attributes(family, labels)) for labels, value in values.items()]

    def _snapshot(self) -> Snapshot:
        with self._lock:
            found = self._reading.snapshot()
        for (outcome, source), count in list(self._own.items()):
            found.put("checks", count, self._name, outcome, source)
        return found

    @property
    def _name(self) -> str:
        return self._limiter._name or _DEFAULT  # noqa: SLF001 - of the same package

    # ── Spans ──────────────────────────────────────────────────────────────────────────────────

    def _replace(self) -> dict[str, Any]:
        """Put the traced verbs in place; what was there on the limiter itself, if anything."""
        awaited = hasattr(self._limiter, "__aenter__")
        # Without rules, `evaluate` asks `check`, and one span is enough.
        names = ["check", "evaluate_all", *(["evaluate"] if self._ruled else [])]
        replaced = {name: vars(self._limiter).get(name) for name in names}
        for name in names:
            verb = getattr(self._limiter, name)
            traced = self._traced_async(verb) if awaited else self._traced(verb)
            setattr(self._limiter, name, traced)
        return replaced

    def _traced(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._span() as span:
                answer = verb(*args, **kwargs)
                self._tell(span, answer, args, kwargs)
                return answer

        return _named(traced, verb)

    def _traced_async(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        async def traced(*args: Any, **kwargs: Any) -> Any:
            with self._span() as span:
                answer = await verb(*args, **kwargs)
                self._tell(span, answer, args, kwargs)
                return answer

        return _named(traced, verb)

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

    def _tell(self, span: Span, answer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if isinstance(answer, list):
            told = _of_several([each.decision for each in answer])
        else:
            told = _of_one(answer, args[1] if len(args) > 1 else kwargs.get("cost", 1))
        span.set_attributes(dict(told))
        if not self._ruled:
            self._count(answer)

    def _count(self, answer: Any) -> None:
        decisions = [each.decision for each in answer] if isinstance(answer, list) else [answer]
        local = self._limiter._on_failure == "local"  # noqa: SLF001 - of the same package
        for decision in decisions:
            outcome = "allowed" if decision.allowed else "denied"
            source = ("local" if local else "policy") if decision.degraded else "store"
            with self._lock:
                counted = (outcome, source)
                self._own[counted] = self._own.get(counted, 0) + 1


def _has_rules(limiter: Any) -> bool:
    try:
        limiter.counts()
    except ConfigError:
        return False
    except AttributeError:
        raise ConfigError(
            f"{type(limiter).__name__} is not a limiter; instrument a Limiter or an AsyncLimiter"
        ) from None
    return True


def _named(traced: Callable[..., Any], verb: Callable[..., Any]) -> Callable[..., Any]:
    # What the kernel has made is no function, and has neither name nor page.
    return wraps(verb)(traced) if hasattr(verb, "__name__") else traced


def _of_one(answer: Any, cost: int) -> Attributes:
    """Of a Decision, or of a CheckResult."""
    decision = getattr(answer, "decision", answer)
    told: dict[str, str | int | bool] = {
        "tollkeeper.outcome": "allowed" if decision.allowed else "denied",
        "tollkeeper.rule": decision.rule,
        "tollkeeper.degraded": decision.degraded,
        "tollkeeper.remaining": decision.remaining,
        "tollkeeper.cost": cost,
    }
    if answer is not decision:
        told["tollkeeper.kind"] = answer.kind
    return told


def _of_several(decisions: list[Any]) -> Attributes:
    """All pass, or none is charged: one outcome."""
    return {
        "tollkeeper.outcome": "allowed" if all(decisions) else "denied",
        "tollkeeper.degraded": any(each.degraded for each in decisions),
        "tollkeeper.checks": len(decisions),
    }


def _attributes(family: Family, labels: str) -> Attributes:
    return dict(zip(family.labels, labels.split(JOIN), strict=True)) if family.labels else {}
