"""What the tests of reconciliation have in common: healthy states, a look, and what it found."""

from __future__ import annotations

from typing import Any

from tollkeeper import Limiter
from tollkeeper.cli.reconcile import Asked, Finding, Report, reconcile
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import from_data


def document(limits: str = "100/hour", rule: str = "orders") -> Document:
    rules = [{"id": rule, "by": ["user"], "limits": [limits]}]
    return from_data({"version": 1, "rules": rules})


def patient(uri: str) -> str:
    """The store, with time enough on a busy machine: what is not counted would be missed here."""
    return f"{uri}?deadline_ms=10000&connect_ms=10000"


def spend(uri: str, keys: int = 20, rule: str = "orders") -> list[bytes]:
    """Healthy states; their keys."""
    with Limiter("100/hour", store=patient(uri), name=rule) as limiter:
        for number in range(keys):
            limiter.check(f"user:{number}")
    return [b"tk:{user:%d}" % number for number in range(keys)]


def looked(uri: str, **options: Any) -> Report:
    patience = {"connect_ms": 10_000, **options.pop("options", {})}
    return reconcile(Asked(uri, patience, **{"pause_seconds": 0.0, **options}))


def found(report: Report, check: str) -> list[Finding]:
    return [each for each in report.findings if each.check == check]


def wrong(report: Report) -> dict[str, str]:
    """What is not as it should be, by check."""
    return {each.check: each.what for each in report.findings if each.level != "ok"}
