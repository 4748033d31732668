"""What a fault did, by failure policy: checked, and printed as one line each."""

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
    "open": "let pass uncounted while the store was away",
    "closed": "",
    "local": "counted here while the store was away, beside what the store had admitted",
}


@dataclass(frozen=True, slots=True)
class Told:
    """What one policy did."""

    admitted: int
    degraded: int
    """Answers, allowed or not."""
    degraded_admitted: int
    over: int


def verify(
    record: Record,
    fault: str,
    healed_ns: int | None = None,
    *,
    lossy: Collection[Key] = (),
    why_lossy: str = "",
) -> dict[str, Told]:
    """Check every promise and print what was seen, a line for each policy.

    `healed_ns`  when the fault had ended; from then on it is recovery
    `lossy`      keys whose store may have lost what it had counted, by `why_lossy`
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
        told = found[policy] = _told(record, keys)
        lost = sum(exact_excess(record, key) for key in keys if key in lossy)
        assert told.over <= told.degraded_admitted + lost, "more than the policy let pass"
        reasons = [_WHY[policy]] if told.degraded_admitted and told.over else []
        reasons += [f"{lost} of them {why_lossy}"] if lost else []
        print(
            f"{fault}, {policy}: {told.admitted} admitted, {told.degraded} answers degraded "
            f"({told.degraded_admitted} admitted), over by {told.over} units"
            f"{': ' + '; '.join(reasons) if reasons else ''}; "
            f"{_recovery(record, keys, healed_ns)}{slowest} late"
        )
    return found


def _assert_in_time(record: Record) -> None:
    """Nobody waited longer than the deadline, and what this machine adds to it."""
    longest_ns = int((DEADLINE_S + SLACK_S) * 1e9) + record.lag_ns
    late = [each for each in record.noted if each.told_ns - each.sent_ns > longest_ns]
    assert not late, late[:3]


def _assert_as_chosen(policy: str, key: Key, noted: list[Noted]) -> None:
    """Degraded answers are those that the policy gives."""
    degraded = [each for each in noted if each.degraded]
    if policy == "open":
        assert all(each.allowed for each in degraded), "open denied"
    elif policy == "closed":
        assert not any(each.allowed for each in degraded), "closed let pass"
    else:
        # Each node has its part of the limit: together they keep the whole.
        admitted = [each.admitted for each in degraded if each.allowed]
        assert excess(limit_of(key.case), admitted) == 0, "the nodes' parts were over"


def _told(record: Record, keys: Collection[Key]) -> Told:
    noted = [each for key in keys for each in record.of(key)]
    over = sum(
        excess(limit_of(key.case), [each.admitted for each in record.of(key) if each.allowed])
        for key in keys
    )
    return Told(
        admitted=sum(each.units for each in noted if each.allowed),
        degraded=sum(each.degraded for each in noted),
        degraded_admitted=sum(each.units for each in noted if each.degraded and each.allowed),
        over=over,
    )


def _recovery(record: Record, keys: Collection[Key], healed_ns: int | None) -> str:
    if healed_ns is None:
        return ""
    last_ns = max(
        (each.told_ns for each in record.noted if each.degraded and each.key in keys), default=0
    )
    return f"exact again {max(last_ns - healed_ns, 0) / 1e9:.2f} s after it was healed; "
