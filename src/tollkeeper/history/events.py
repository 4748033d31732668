"""What is kept of a decision, and of whom it tells how much.

On the path only what is at hand is put aside, as a `Noted`. What a row of the decision log needs
beyond that is made of it in another thread: texts are cut to what a column takes, cleaned of what a
database refuses, and subjects are told as the operator wants them told:

    plain    as they are counted: "user:42"
    hashed   each value by a digest: "user:#5f0c…". The same value has the same digest on every
             node, so usage still adds up and who knows a value can ask for it. It is no secret: who
             can guess a value can try it.
    none     not at all; usage is then by rule alone.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from tollkeeper.core.model import CheckResult, Request

Subjects = Literal["plain", "hashed", "none"]

# Between the parts of a subject; a test holds it to be the one of `identify`.
PART: Final = "\x1f"
SUBJECT_LENGTH_MAX: Final = 600
ENDPOINT_LENGTH_MAX: Final = 512
METHOD_LENGTH_MAX: Final = 32
SHADOWS_LENGTH_MAX: Final = 1_000
# The largest number that both databases take.
NUMBER_MAX: Final = 2**63 - 1
_DIGEST_BYTES: Final = 12
# What requests are known by where no rule says by what they are counted, the first first.
_KNOWN_BY: Final = ("api_key", "user", "tenant", "ip")
# What lists decide is told under these names; no rule has one in brackets.
LISTED: Final = {"blocked": "(deny)", "exempt": "(allow)", "unlimited": "(none)"}


# What is put aside of a decision, on the path: the time, the ruling, the cost, who it is where the
# ruling does not say whom it counts, the endpoint and the method. A plain tuple: half the time.
Noted = tuple[int, "CheckResult", int, str, "str | None", "str | None"]


class Event(NamedTuple):
    """A decision, as a row of the log."""

    at_us: int
    node: str
    rule: str
    subject: str
    endpoint: str
    method: str
    outcome: str
    kind: str
    cost: int
    retry_after_ms: int
    degraded: int
    shadow_denied: str
    """The rules' ids, as a list in JSON."""


def known_as(request: Request) -> str:
    """Who sends a request, where no rule says it: the first of its fields that it has."""
    for name in _KNOWN_BY:
        value = getattr(request, name)
        if value is not None:
            return f"{name}:{value}"[:SUBJECT_LENGTH_MAX]
    return ""


def subject_of(ruling: CheckResult) -> str:
    """Whom the decision is about, as the rule counts that spoke; "" where none did."""
    counted = ruling.counted
    if len(counted) == 1:
        return counted[0][0]
    rule = ruling.decision.rule
    for applied, (subject, _) in zip(ruling.applied, counted, strict=False):
        if applied.rule == rule:
            return subject
    return ""


def rule_of(ruling: CheckResult) -> str:
    """The rule that spoke, or the list."""
    if ruling.kind in LISTED:
        return LISTED[ruling.kind]
    if ruling.decision.rule:
        return ruling.decision.rule
    return ruling.applied[0].rule if ruling.applied else LISTED["unlimited"]


def event_of(noted: Noted, node: str, subjects: Subjects) -> Event:
    """The row for what was noted."""
    now_ns, ruling, cost, known, endpoint, method = noted
    decision = ruling.decision
    shadows = ruling.shadow_denied
    # Up: a client that is told so many milliseconds is let in then. Nobody waits on a deny list.
    wait_ms = 0 if ruling.kind == "blocked" else -(-decision.retry_after_ns // 1_000_000)
    return Event(
        now_ns // 1_000,
        node,
        rule_of(ruling),
        told(subject_of(ruling) or known, subjects),
        cleaned(endpoint or "", ENDPOINT_LENGTH_MAX),
        cleaned(method or "", METHOD_LENGTH_MAX),
        "allowed" if decision.allowed else "denied",
        ruling.kind,
        min(cost, NUMBER_MAX),
        wait_ms,
        int(decision.degraded),
        json.dumps(_listed(shadows)) if shadows else "[]",
    )


def _listed(shadows: tuple[str, ...]) -> list[str]:
    """As many as fit."""
    found: list[str] = []
    length = 0
    for each in shadows:
        length += len(each) + 4
        if length > SHADOWS_LENGTH_MAX:
            break
        found.append(each)
    return found


def told(subject: str, how: Subjects) -> str:
    """A subject as it is to be told.

    >>> told("tenant:acme", "plain"), told("tenant:acme", "none")
    ('tenant:acme', '')
    >>> told("tenant:acme", "hashed")
    'tenant:#7dd7eea36c357c826d21bc31'
    """
    if how == "none":
        return ""
    if how == "hashed":
        return PART.join([_hashed(part) for part in subject.split(PART)])
    return cleaned(subject, SUBJECT_LENGTH_MAX)


def _hashed(part: str) -> str:
    name, colon, value = part.partition(":")
    if not colon:
        return cleaned(part, SUBJECT_LENGTH_MAX)
    digest = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
    return f"{cleaned(name, SUBJECT_LENGTH_MAX)}:#{digest.hexdigest()}"


def cleaned(text: str, length_max: int) -> str:
    """The text as every database takes it: so long at most, no NUL, no half of a pair.

    >>> cleaned("a" * 9, 5), cleaned("a\\0b", 5)
    ('aaaa…', 'a\ufffdb')
    """
    if len(text) > length_max:
        text = text[: length_max - 1] + "…"
    if text.isascii():
        return text.replace("\0", "\ufffd") if "\0" in text else text
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
