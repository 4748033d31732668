"""The records: decisions as rows of a log, and usage added up by minute.

**Decisions.** On the path of a request, only the values at hand are put aside, as a NotedDecision.
Another thread makes a row of it: texts are cut to the length of their column, characters that a
database rejects are replaced, and subjects are recorded as the operator has chosen:

    plain    as they are counted: "user:42"
    hashed   each value as a digest: "user:#5f0c…". The same value has the same digest on every
             node, so usage still adds up, and a query by the value works. It is not a secret: a
             value that can be guessed can be verified.
    none     not at all; usage is then by rule only.

The *identity* of a request is its user, tenant, API key and address. It is recorded with every
decision, in the same mode, because the rule that decided may count something else. An API key is
always recorded as a digest there.

**Usage.** A *bucket* counts the requests of one subject under one rule in one minute: allowed
requests, denied requests, units spent, and requests that the rule would have denied if it were not
in shadow mode. A rule may deny a request of a subject that it does not count (a rule for all
requests together). Such a denial is also counted for the user, the tenant and the subjects of the
other rules, apart from `denied`, so that the sum of `denied` is the number of denials. Buckets are
added to, never set, in memory and in the database, so the counts of several workers and nodes add
up in any order. At most BUCKETS_MAX buckets are kept. Requests beyond them are counted together, by
rule, as OTHERS: the sums stay right, only the subject is lost. If even those are too many (rules
times minutes, while the database is unavailable for long), they are dropped, and the drops are
counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from ratekeeper.core.model import CheckResult, Request

SubjectMode = Literal["plain", "hashed", "none"]

# Separates the parts of a subject; a test compares it with that of the rule engine.
PART: Final = "\x1f"
SUBJECT_LENGTH_MAX: Final = 600
ENDPOINT_LENGTH_MAX: Final = 512
METHOD_LENGTH_MAX: Final = 32
SHADOWS_LENGTH_MAX: Final = 1_000
IDENTITY_LENGTH_MAX: Final = 256
REQUEST_ID_LENGTH_MAX: Final = 128
# The largest number that both databases store.
NUMBER_MAX: Final = 2**63 - 1
_DIGEST_BYTES: Final = 12
_DIGEST: Final = re.compile(rf"#[0-9a-f]{{{2 * _DIGEST_BYTES}}}")
# The fields that identify a caller where no rule does, the first one first.
_CALLER_FIELDS: Final = ("api_key", "user", "tenant", "ip")
# Decisions without a rule are recorded under these names; no rule id begins with a parenthesis.
LISTED: Final = {"blocked": "(deny)", "exempt": "(allow)", "unlimited": "(none)"}

BUCKETS_MAX: Final = 50_000
OTHERS_MAX: Final = 5_000
OTHERS: Final = "(others)"
# The outcome of a record that is no decision: regions together were above an eventual limit.
EXCESS: Final = "excess"
MINUTE_NS: Final = 60 * 10**9
MINUTE_SECONDS: Final = 60


# ── Decisions ──────────────────────────────────────────────────────────────────────────────────

# User, tenant, API key and address.
Identity = tuple["str | None", "str | None", "str | None", "str | None"]
# The time, the result, the cost, the caller if the result has no counted subject, the endpoint,
# the method, the identity and the request ID. A plain tuple, because creating one takes half the
# time of a named one.
NotedDecision = tuple[
    int, "CheckResult", int, str, "str | None", "str | None", Identity, "bytes | str"
]


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
    limit_units: int = 0
    """The limit that decided; 0 if none did."""
    window_ms: int = 0
    used_units: int = -1
    """The units that the subject had used of the limit, after the decision; -1: not known."""
    region: str = ""
    user_id: str = ""
    tenant: str = ""
    api_key: str = ""
    """A digest, whatever the mode."""
    ip: str = ""
    request_id: str = ""
    rules: str = "{}"
    """The outcome of each rule that applied, as a JSON object."""


def identity_of(request: Request) -> Identity:
    """Return the identity of a request; long values are cut: the caller keeps them in memory."""
    user, tenant, api_key, ip = request.user, request.tenant, request.api_key, request.ip
    if (
        (user is None or len(user) <= IDENTITY_LENGTH_MAX)
        and (tenant is None or len(tenant) <= IDENTITY_LENGTH_MAX)
        and (api_key is None or len(api_key) <= IDENTITY_LENGTH_MAX)
        and (ip is None or len(ip) <= IDENTITY_LENGTH_MAX)
    ):
        return user, tenant, api_key, ip
    return _cut(user), _cut(tenant), _cut(api_key), _cut(ip)


def _cut(value: str | None) -> str | None:
    return None if value is None else value[: IDENTITY_LENGTH_MAX + 1]


def caller_of(request: Request) -> str:
    """Return the caller of a request that no rule counts: the first identifying field it has."""
    for name in _CALLER_FIELDS:
        value = getattr(request, name)
        if value is not None:
            return subject_of_field(name, value)
    return ""


def subject_of_field(name: str, value: str) -> str:
    """Return a field of a request as a subject.

    No rule has checked the value: it must not look like several parts.
    """
    subject = f"{name}:{value}"
    if len(subject) <= SUBJECT_LENGTH_MAX and PART not in subject:
        return subject
    return subject[:SUBJECT_LENGTH_MAX].replace(PART, "\ufffd")


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


def event_of(
    noted: NotedDecision, node: str, subjects: SubjectMode, region: str = ""
) -> DecisionEvent:
    """Return the row of a decision."""
    now_ns, result, cost, caller, endpoint, method, identity, request_id = noted
    decision = result.decision
    shadows = result.shadow_denied
    has_limit = result.kind in {"limited", "unavailable"}
    is_exact = result.kind == "limited" and not decision.degraded and decision.penalty is None
    user, tenant, api_key, ip = identity
    id_text = request_id.decode("latin-1") if isinstance(request_id, bytes) else request_id
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
        limit_units=decision.limit if has_limit else 0,
        window_ms=decision.policy.window_ns // 1_000_000 if has_limit else 0,
        used_units=decision.limit - decision.remaining if is_exact else -1,
        region=region,
        user_id=recorded_value(user, subjects),
        tenant=recorded_value(tenant, subjects),
        api_key="" if subjects == "none" else recorded_value(api_key, "hashed"),
        ip=recorded_value(ip, subjects),
        request_id=cleaned(id_text, REQUEST_ID_LENGTH_MAX),
        rules=json.dumps(outcomes_of(result)),
    )


def excess_of(
    now_ns: int,
    node: str,
    region: str,
    rule: str,
    subject: str,
    units: int,
    subjects: SubjectMode,
) -> DecisionEvent:
    """Return the row of an excess: regions together have admitted more than an eventual limit.

    `units` is by how much, after a report of `region`.
    """
    return DecisionEvent(
        at_us=now_ns // 1_000,
        node=node,
        rule=cleaned(rule, SUBJECT_LENGTH_MAX),
        subject=recorded_subject(subject, subjects),
        endpoint="",
        method="",
        outcome=EXCESS,
        kind=EXCESS,
        cost=min(units, NUMBER_MAX),
        retry_after_ms=0,
        degraded=0,
        shadow_denied="[]",
        region=region,
    )


def outcomes_of(result: CheckResult) -> dict[str, str]:
    """Return the outcome of each rule that applied, as many as fit into the column.

    After a denial by a penalty, the other rules were not checked.
    """
    decision = result.decision
    if decision.allowed:
        found = dict.fromkeys([each.rule for each in result.applied], "allowed")
    else:
        denied = decision.source if isinstance(decision.source, tuple) else (decision.rule,)
        other = "allowed" if decision.penalty is None else "not_checked"
        found = {each.rule: "denied" if each.rule in denied else other for each in result.applied}
    found |= dict.fromkeys(result.shadow_denied, "shadow_denied")
    return {rule: found[rule] for rule in _fitting(tuple(found))}


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


def recorded_value(value: str | None, mode: SubjectMode) -> str:
    """Return a field of the identity as it is recorded; "" if the request does not have it.

    >>> recorded_value("acme", "plain"), recorded_value("acme", "none")
    ('acme', '')
    >>> recorded_value("acme", "hashed")
    '#7dd7eea36c357c826d21bc31'
    """
    if not value or mode == "none":
        return ""
    return _digest(_cut(value) or "") if mode == "hashed" else cleaned(value, IDENTITY_LENGTH_MAX)


def queried_subject(subject: str, mode: SubjectMode) -> str:
    """Return the recorded form of a subject in a query, whose values may be digests already.

    A query shows digests, and its reader has no other name for these subjects.

    >>> queried_subject("tenant:#7dd7eea36c357c826d21bc31", "hashed")
    'tenant:#7dd7eea36c357c826d21bc31'
    >>> queried_subject("tenant:acme", "hashed")
    'tenant:#7dd7eea36c357c826d21bc31'
    """
    parts = [
        part if _DIGEST.fullmatch(part.partition(":")[2]) else _hashed(part)
        for part in subject.split(PART)
    ]
    return PART.join(parts) if mode == "hashed" else recorded_subject(subject, mode)


def queried_value(value: str, mode: SubjectMode) -> str:
    """Return the recorded form of a value in a query, which may be a digest already."""
    is_digest = mode == "hashed" and _DIGEST.fullmatch(value)
    return value if is_digest else recorded_value(value, mode)


def _hashed(part: str) -> str:
    name, colon, value = part.partition(":")
    if not colon:
        return cleaned(part, SUBJECT_LENGTH_MAX)
    return f"{cleaned(name, SUBJECT_LENGTH_MAX)}:{_digest(value)}"


def _digest(value: str) -> str:
    digest = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
    return f"#{digest.hexdigest()}"


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
# Allowed, denied, units, shadow denials, and denials by a rule that does not count this subject: a
# list, because the path of a request adds to it.
Counts = list[int]


class UsageIncrement(NamedTuple):
    """The counts of a bucket, to be added to the database."""

    subject: str
    rule: str
    start_s: int
    allowed: int
    denied: int
    units: int
    shadow_denied: int = 0
    denied_indirectly: int = 0

    @property
    def requests(self) -> int:
        """The number of requests that this increment counts."""
        return self.allowed + self.denied + self.shadow_denied + self.denied_indirectly


class UsageBuckets:
    """Buckets in memory, for one thread."""

    __slots__ = ("_buckets_max", "_is_known", "_others_max", "buckets", "dropped")

    def __init__(
        self,
        buckets_max: int = BUCKETS_MAX,
        others_max: int = OTHERS_MAX,
        is_known: Callable[[tuple[str, str]], bool] | None = None,
    ) -> None:
        """`is_known`: half of the buckets are for subjects and rules that it accepts."""
        self._is_known = is_known
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
        if len(buckets) >= self._buckets_max or (
            self._is_known is not None
            and len(buckets) >= self._buckets_max // 2
            and not self._is_known(bucket[:2])
        ):
            _, rule, minute = bucket
            bucket = (OTHERS, rule, minute)
            found = buckets.get(bucket)
            if found is not None:
                return found
            if len(buckets) >= self._buckets_max + self._others_max:
                self.dropped += 1
                return [0, 0, 0, 0, 0]
        counts = buckets[bucket] = [0, 0, 0, 0, 0]
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
        """Remove and return the oldest buckets."""
        found = []
        for bucket in list(islice(self.buckets, limit)):
            subject, rule, minute = bucket
            counts = self.buckets.pop(bucket)
            found.append(UsageIncrement(subject, rule, minute * MINUTE_SECONDS, *counts))
        return found

    def put_back(self, increments: Iterable[UsageIncrement]) -> None:
        """Add the increments that `take` returned."""
        for each in increments:
            bucket = (each.subject, each.rule, each.start_s // MINUTE_SECONDS)
            self.add(bucket, list(each[3:]))
