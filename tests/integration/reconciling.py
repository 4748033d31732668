"""What the tests of `ratekeeper reconcile` share: healthy states, a run, and its findings."""

from __future__ import annotations

from typing import Any

from ratekeeper import Limit, Limiter
from ratekeeper.cli.reconcile import (
    ReconcileFinding,
    ReconcileOptions,
    ReconcileReport,
    reconcile,
)
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import from_data
from tests.integration.redis_wires import key_of


def document(limits: str = "100/hour", rule: str = "orders") -> Document:
    rules = [{"id": rule, "by": ["user"], "limits": [limits]}]
    return from_data({"version": 1, "rules": rules})


def patient(uri: str) -> str:
    """Return the URI with long timeouts: on a busy machine, a check must not be lost."""
    return f"{uri}?deadline_ms=10000&connect_ms=10000"


def spend(uri: str, keys: int = 20, rule: str = "orders") -> list[bytes]:
    """Create a state of each subject; return the keys of their buckets."""
    limit = Limit(100, per=3_600)
    subjects = [f"user:{number}" for number in range(keys)]
    with Limiter(limit, store=patient(uri), name=rule) as limiter:
        for each in subjects:
            limiter.check(each)
    return [key_of(each).encode() for each in subjects]


def reconciled(uri: str, **options: Any) -> ReconcileReport:
    """Run a reconciliation without pauses."""
    patience = {"connect_ms": 10_000, **options.pop("options", {})}
    return reconcile(ReconcileOptions(uri, patience, **{"pause_seconds": 0.0, **options}))


def found(report: ReconcileReport, check: str) -> list[ReconcileFinding]:
    """Return the findings of one check."""
    return [each for each in report.findings if each.check == check]


def wrong(report: ReconcileReport) -> dict[str, str]:
    """Return the findings that are not ok, by check."""
    return {each.check: each.what for each in report.findings if each.level != "ok"}
