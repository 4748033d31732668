"""What is wrong on this node now, as the overview says it: at most eight findings.

Each follows from the present state that `GET /v1/admin/activity` returns. Nothing here is stored or
observed over time: alerts over time windows are for Prometheus (`metrics/operations/alerts.yaml`).
A finding names the section of docs/runbooks.md that says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ratekeeper.metrics.operations import DEFAULTS

# A finding names so many servers; there may be dozens.
_SERVERS_MAX = 3


class Finding(NamedTuple):
    """One thing that is wrong now."""

    about: str
    severity: Literal["critical", "warning"]
    text: str
    runbook: str
    """The heading in docs/runbooks.md."""


def findings(now: Mapping[str, Any]) -> list[Finding]:
    """Return what is wrong in the `now` of the activity, critical findings first."""
    return [*_of_store(now), *_of_node(now)]


def _of_store(now: Mapping[str, Any]) -> Iterator[Finding]:
    if not now["store"]["healthy"]:
        text = f"The store does not decide: {now['store']['error']}"
        yield Finding("store", "critical", text, "RatekeeperDegraded")
    tripped = [each["server"] for each in now["breakers"] if each["state"] != "closed"]
    if tripped:
        text = f"Breakers are not closed: {_listed(tripped)}. The failure policy decides instead."
        yield Finding("breakers", "critical", text, "RatekeeperBreakerOpen")
    if share := now["degraded_share"]:
        text = f"The store did not decide {share:.1%} of the checks of the last minute alone."
        yield Finding("degraded checks", "critical", text, "RatekeeperDegraded")
    if clocks := now["clock_offsets"]:
        shown = [f"{server} by {offset:+.1f} s" for server, offset in clocks.items()]
        text = f"Clocks of servers differ from the clock of this node: {_listed(shown)}."
        yield Finding("clocks", "warning", text, "RatekeeperClockDrift")
    parts = (
        ("states", now["states_share"], DEFAULTS["store_fullness"]),
        ("memory for sliding window logs", now["logs_share"], DEFAULTS["log_fullness"]),
    )
    if full := [f"{share:.0%} of its {part}" for part, share, most in parts if share > most]:
        text = f"The store is nearly full: it uses {' and '.join(full)}."
        yield Finding("full store", "warning", text, "RatekeeperStoreNearlyFull")


def _of_node(now: Mapping[str, Any]) -> Iterator[Finding]:
    rules, age_s = now["rules"], now["rules"]["age_seconds"]
    if rules["error"] or (age_s or 0) > DEFAULTS["rules_age"]:
        why = rules["error"] or f"their source has not answered for {age_s:,.0f} s"
        text = f"The rules may be out of date: {why}"
        yield Finding("rules", "warning", text, "RatekeeperRulesStale")
    if dropped := now["dropped_records"]:
        text = f"{dropped:,} records of decisions were dropped in the last minute."
        yield Finding("records", "warning", text, "RatekeeperRecordsDropped")
    if ended := now["ended_workers"]:
        text = f"{ended:,} workers ended in the last minute and were replaced. The log says why."
        yield Finding("workers", "warning", text, "RatekeeperWorkersRestarting")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SERVERS_MAX
    return ", ".join(names[:_SERVERS_MAX]) + (f" and {more:,} more" if more > 0 else "")
