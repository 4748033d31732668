"""The records: decisions as rows of a log, and usage added up by minute.

**Decisions.** On the path of a request, only the values at hand are put aside, as a NotedDecision.
Another thread makes a row of it: texts are cut to the length of their column, characters that a
database rejects are replaced, and subjects are recorded as the operator has chosen:

    plain    as they are counted: "user:42"
    hashed   each value as a digest: "user:#5f0c…". The same value has the same digest on every
             node, so usage still adds up, and a query by the value works. It is not a secret: a
             value that can be guessed can be verified.
    none     not at all; usage is then by rule only.

**Usage.** A *bucket* counts what one subject did under one rule in one minute: allowed requests,
denied requests, and units spent. Buckets are added to, never set, in memory and in the database, so
the counts of several workers and nodes add up in any order. At most BUCKETS_MAX buckets are kept.
Requests beyond them are counted together, by rule, as OTHERS: the sums stay right, only the subject
is lost. If even those are too many (rules times minutes, while the database is unavailable for
long), they are dropped, and the drops are counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from tollkeeper.core.model import CheckResult, Request

SubjectMode = Literal["plain", "hashed", "none"]

# Separates the parts of a subject; a test compares it with that of the rule engine.
PART: Final = "\x1f"
SUBJECT_LENGTH_MAX: Final = 600
ENDPOINT_LENGTH_MAX: Final = 512
METHOD_LENGTH_MAX: Final = 32
SHADOWS_LENGTH_MAX: Final = 1_000
# The largest number that both databases store.
NUMBER_MAX: Final = 2**63 - 1
_DIGEST_BYTES: Final = 12
# The fields that identify a caller where no rule does, the first one first.
_CALLER_FIELDS: Final = ("api_key", "user", "tenant", "ip")
# Decisions without a rule are recorded under these names; no rule id has parentheses.
LISTED: Final = {"blocked": "(deny)", "exempt": "(allow)", "unlimited": "(none)"}

BUCKETS_MAX: Final = 50_000
OTHERS_MAX: Final = 5_000
OTHERS: Final = "(others)"
MINUTE_NS: Final = 60 * 10**9
MINUTE_SECONDS: Final = 60


# ── Decisions ──────────────────────────────────────────────────────────────────────────────────

# The time, the result, the cost, the caller if the result has no counted subject, the endpoint
# and the method. A plain tuple, because creating one takes half the time of a named one.
NotedDecision = tuple[int, "CheckResult", int, str, "str | None", "str | None"]


class DecisionEvent(NamedTuple):
    """A decision, as a row of the log."""

    at_us: int
    node: str
    rule: str
    subject: str
    endpoint: str
    method: str
    outcome: str
    kind: str
    """The kind of the result, or of the penalty that denied the request."""
    cost: int
    retry_after_ms: int
    degraded: int
    shadow_denied: str
    """The ids of the rules, as a JSON list."""


def caller_of(request: Request) -> str:
    """Return the caller of a request that no rule counts: the first identifying field it has."""
    for name in _CALLER_FIELDS:
        value = getattr(request, name)
        if value is not None:
            # No rule has checked the value: it must not look like several parts.
            return f"{name}:{value}"[:SUBJECT_LENGTH_MAX].replace(PART, "\ufffd")
    return ""


def subject_of(result: CheckResult) -> str:
    """Return the subject of the rule that decided; "" if no rule did."""
    counted = result.counted
    if len(counted) == 1:
        return counted[0][0]
    rule = result.decision.rule
    for applied, (subject, _) in zip(result.applied, counted, strict=False):
        if applied.rule == rule:
            return subject
    return ""


def rule_of(result: CheckResult) -> str:
    """Return the rule or the list that decided."""
    if result.kind in LISTED:
        return LISTED[result.kind]
    if result.decision.rule:
        return result.decision.rule
    return result.applied[0].rule if result.applied else LISTED["unlimited"]


def event_of(noted: NotedDecision, node: str, subjects: SubjectMode) -> DecisionEvent:
    """Return the row of a decision."""
    now_ns, result, cost, caller, endpoint, method = noted
    decision = result.decision
    shadows = result.shadow_denied
    # Rounded up: a client that waits this many milliseconds is admitted. A client on the deny list
    # cannot wait.
    wait_ms = 0 if result.kind == "blocked" else -(-decision.retry_after_ns // 1_000_000)
    return DecisionEvent(
        now_ns // 1_000,
        node,
        rule_of(result),
        recorded_subject(subject_of(result) or caller, subjects),
        cleaned(endpoint or "", ENDPOINT_LENGTH_MAX),
        cleaned(method or "", METHOD_LENGTH_MAX),
        "allowed" if decision.allowed else "denied",
        decision.penalty or result.kind,
        min(cost, NUMBER_MAX),
        wait_ms,
        int(decision.degraded),
        json.dumps(_fitting(shadows)) if shadows else "[]",
    )


def _fitting(shadows: tuple[str, ...]) -> list[str]:
    """Return as many ids as fit into the column."""
    found: list[str] = []
    length = 0
    for each in shadows:
        length += len(each) + 4
        if length > SHADOWS_LENGTH_MAX:
            break
        found.append(each)
    return found


def recorded_subject(subject: str, mode: SubjectMode) -> str:
    """Return a subject as it is recorded.

    >>> recorded_subject("tenant:acme", "plain"), recorded_subject("tenant:acme", "none")
    ('tenant:acme', '')
    >>> recorded_subject("tenant:acme", "hashed")
    'tenant:#7dd7eea36c357c826d21bc31'
    """
    if mode == "none":
        return ""
    if mode == "hashed":
        return PART.join([_hashed(part) for part in subject.split(PART)])
    return cleaned(subject, SUBJECT_LENGTH_MAX)


def scope_parts(scope: Mapping[str, str], mode: SubjectMode) -> list[str]:
    """Return the parts that a recorded subject must have to belong to a scope.

    Without recorded subjects, no record belongs to a scope: the parts are those of `plain`, which
    no record has.

    >>> scope_parts({"tenant": "acme"}, "none")
    ['tenant:acme']
    """
    recorded: SubjectMode = "plain" if mode == "none" else mode
    return [recorded_subject(f"{name}:{value}", recorded) for name, value in scope.items()]


def _hashed(part: str) -> str:
    name, colon, value = part.partition(":")
    if not colon:
        return cleaned(part, SUBJECT_LENGTH_MAX)
    digest = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
    return f"{cleaned(name, SUBJECT_LENGTH_MAX)}:#{digest.hexdigest()}"


def cleaned(text: str, length_max: int) -> str:
    """Return the text as every database accepts it: cut, without NUL and lone surrogates.

    >>> cleaned("a" * 9, 5), cleaned("a\\0b", 5)
    ('aaaa…', 'a\ufffdb')
    """
    if len(text) > length_max:
        text = text[: length_max - 1] + "…"
    if text.isascii():
        return text.replace("\0", "\ufffd") if "\0" in text else text
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


# ── Usage ──────────────────────────────────────────────────────────────────────────────────────

# The subject, the rule, and the minute since the epoch.
Bucket = tuple[str, str, int]
# Allowed, denied, units: a list, because the path of a request adds to it.
Counts = list[int]


class UsageIncrement(NamedTuple):
    """The counts of a bucket, to be added to the database."""

    subject: str
    rule: str
    start_s: int
    allowed: int
    denied: int
    units: int


class UsageBuckets:
    """Buckets in memory, for one thread."""

    __slots__ = ("_buckets_max", "_others_max", "buckets", "dropped")

    def __init__(self, buckets_max: int = BUCKETS_MAX, others_max: int = OTHERS_MAX) -> None:
        self.buckets: dict[Bucket, Counts] = {}
        self._buckets_max = buckets_max
        self._others_max = others_max
        self.dropped = 0
        """Requests that no bucket had room for."""

    def __len__(self) -> int:
        return len(self.buckets)

    def new(self, bucket: Bucket) -> Counts:
        """Return the counts of a new bucket, or those of OTHERS if there is no room."""
        buckets = self.buckets
        if len(buckets) >= self._buckets_max:
            _, rule, minute = bucket
            bucket = (OTHERS, rule, minute)
            found = buckets.get(bucket)
            if found is not None:
                return found
            if len(buckets) >= self._buckets_max + self._others_max:
                self.dropped += 1
                return [0, 0, 0]
        counts = buckets[bucket] = [0, 0, 0]
        return counts

    def add(self, bucket: Bucket, counts: Counts) -> None:
        """Add counts to a bucket."""
        mine = self.buckets.get(bucket)
        if mine is None:
            dropped = self.dropped
            mine = self.new(bucket)
            if self.dropped > dropped:
                self.dropped = dropped + counts[0] + counts[1]
        for at, count in enumerate(counts):
            mine[at] += count

    def take(self, limit: int) -> list[UsageIncrement]:
        """Remove and return the oldest buckets, sorted: all writers lock rows in this order."""
        found = []
        for bucket in sorted(islice(self.buckets, limit)):
            subject, rule, minute = bucket
            counts = self.buckets.pop(bucket)
            found.append(UsageIncrement(subject, rule, minute * MINUTE_SECONDS, *counts))
        return found
