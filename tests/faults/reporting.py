"""Verify and print the effects of a fault, one line for each failure policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tests.faults.checker import excess
from tests.faults.load import (
    DEADLINE_S,
    POLICIES,
    SLACK_S,
    Key,
    Noted,
    Record,
    exact_excess,
    limit_of,
)

_WHY = {
    "open": "admitted uncounted while the store was unavailable",
    "closed": "",
    "local": "counted locally while the store was unavailable, on top of the store's admissions",
}


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """The effects of a fault under one policy."""

    admitted: int
    degraded: int
    """Degraded answers, allowed or denied."""
    degraded_admitted: int
    over: int


def verify(
    record: Record,
    fault: str,
    healed_ns: int | None = None,
    *,
    lossy: Collection[Key] = (),
    why_lossy: str = "",
) -> dict[str, PolicyReport]:
    """Verify every guarantee and print a line for each policy.

    `healed_ns`  when the fault ended and the recovery began
    `lossy`      keys whose store may have lost counts, for the reason `why_lossy`
    """
    _assert_in_time(record)
    slowest = f"slowest {record.slowest_ns() / 1e6:.0f} ms, this machine {record.lag_ns / 1e6:.0f}"
    found = {}
    for policy in POLICIES:
        keys = record.keys(policy)
        if not keys:
            continue
        for key in keys:
            assert key in lossy or exact_excess(record, key) == 0, f"{fault}: {key} was over"
            _assert_as_chosen(policy, key, record.of(key))
        report = found[policy] = _report(record, keys)
        lost = sum(exact_excess(record, key) for key in keys if key in lossy)
        assert report.over <= report.degraded_admitted + lost, "more than the policy admitted"
        reasons = [_WHY[policy]] if report.degraded_admitted and report.over else []
        reasons += [f"{lost} of them {why_lossy}"] if lost else []
        print(
            f"{fault}, {policy}: {report.admitted} admitted, {report.degraded} answers degraded "
            f"({report.degraded_admitted} admitted), over by {report.over} units"
            f"{': ' + '; '.join(reasons) if reasons else ''}; "
            f"{_recovery(record, keys, healed_ns)}{slowest} late"
        )
    return found


def _assert_in_time(record: Record) -> None:
    """Check that no answer took longer than the deadline plus the machine's own lag."""
    longest_ns = int((DEADLINE_S + SLACK_S) * 1e9) + record.lag_ns
    late = [each for each in record.noted if each.answered_ns - each.sent_ns > longest_ns]
    assert not late, late[:3]


def _assert_as_chosen(policy: str, key: Key, noted: list[Noted]) -> None:
    """Check that each degraded answer follows the policy."""
    degraded = [each for each in noted if each.degraded]
    if policy == "open":
        assert all(each.allowed for each in degraded), "open denied"
    elif policy == "closed":
        assert not any(each.allowed for each in degraded), "closed admitted"
    else:
        # Each node has its share of the limit; together they keep the limit.
        admitted = [each.admitted for each in degraded if each.allowed]
        assert excess(limit_of(key.case), admitted) == 0, "the nodes' shares were over the limit"


def _report(record: Record, keys: Collection[Key]) -> PolicyReport:
    noted = [each for key in keys for each in record.of(key)]
    over = sum(
        excess(limit_of(key.case), [each.admitted for each in record.of(key) if each.allowed])
        for key in keys
    )
    return PolicyReport(
        admitted=sum(each.units for each in noted if each.allowed),
        degraded=sum(each.degraded for each in noted),
        degraded_admitted=sum(each.units for each in noted if each.degraded and each.allowed),
        over=over,
    )


def _recovery(record: Record, keys: Collection[Key], healed_ns: int | None) -> str:
    if healed_ns is None:
        return ""
    last_ns = max(
        (each.answered_ns for each in record.noted if each.degraded and each.key in keys), default=0
    )
    return f"exact again {max(last_ns - healed_ns, 0) / 1e9:.2f} s after it was healed; "
