"""Stage 4: a ruling becomes headers, a status and a body. Pure: no clock, no I/O.

**Headers.** `X-RateLimit-Limit`, `-Remaining` and `-Reset` speak of the tightest limit, because
that is what a client has to heed. `RateLimit-Policy` lists every limit that applied, and
`RateLimit` says how the tightest stands, in the syntax of the IETF draft (structured fields):

    X-RateLimit-Limit: 100                 RateLimit-Policy: "orders.1s";q=10;w=1,
    X-RateLimit-Remaining: 73                                "orders.60s";q=100;w=60
    X-RateLimit-Reset: 1767225636          RateLimit: "orders.60s";r=73;t=36

A rule with one limit is named by its id; with several, each has the limit's name or window after
it. Names are unique in a response and always valid, whatever a rule is called.

**Rounding.** Every time is rounded up to whole seconds: who waits as long as told is let in.

**Speed.** This runs on every request, so all that depends on the applied rules alone is made once
and kept by them, in a dict that is emptied when it is full. What is left is to print four numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import DEFAULT_NAME, AppliedRule, CheckResult, Decision, Limit
from tollkeeper.web.problems import (
    QUOTA_EXCEEDED,
    REDUCED_CAPACITY,
    Answer,
    bad_request_of,
    capacity_refusal_of,
    problem,
    problem_answer,
    window_seconds_of,
)

__all__ = [
    "Answer",
    "Style",
    "bad_request_of",
    "capacity_refusal_of",
    "headers_of",
    "over_limit",
    "problem_of",
    "raw_headers_of",
    "refusal_of",
    "retry_after_seconds_of",
    "status_of",
]

# How many sets of applied rules are remembered. A document has about as many as it has rules,
# tiers and overrides; each takes about 1 kB.
KNOWN_MAX: Final = 4_096
# Servers and clients refuse headers of 8 kB and more; the limits that do not fit are not listed.
POLICY_BYTES_MAX: Final = 4_096
_RESET_SECONDS_MAX: Final = 253_402_300_799  # the last second of the year 9999

RawHeader = tuple[bytes, bytes]

DRAFTS: Final = (10, 7, 6, None)


@dataclass(frozen=True, slots=True)
class Style:
    """Which headers are sent.

    `draft`   the revision of the IETF draft: 10 (`RateLimit: "orders";r=73;t=36`), 7 (`RateLimit:
              limit=100, remaining=73, reset=36`), 6 (`RateLimit-Remaining: 73` and so on), or None
              for none of them.
    `legacy`  whether `X-RateLimit-…` are sent.
    """

    draft: Literal[10, 7, 6] | None = 10
    legacy: bool = True

    def __post_init__(self) -> None:
        if self.draft not in DRAFTS or isinstance(self.draft, bool):
            raise ConfigError(
                f"draft={show(self.draft)} is not a revision that is known; choose 10, 7, 6 or None"
            )
        if not isinstance(self.legacy, bool):
            raise ConfigError(f"legacy={show(self.legacy)} is not True or False")


_STYLE: Final = Style()

# ── What is known of the rules that applied ────────────────────────────────────────────────────


class _Policy(NamedTuple):
    """One limit of one rule, as the headers say it."""

    name: str
    limit: Limit
    rule: str
    limit_header: RawHeader
    start: bytes
    """Of the `RateLimit` header, up to the number that remains."""


class _Known:
    """All that headers say of a set of applied rules, whatever was decided."""

    __slots__ = ("_by_limit", "applied", "headers", "only", "policies")

    def __init__(self, applied: tuple[AppliedRule, ...]) -> None:
        self.applied = applied  # also keeps the limits alive, whose ids are keys here
        self.policies = tuple(_policies(applied))
        self.only = self.policies[0] if len(self.policies) == 1 else None
        self._by_limit = {(each.rule, id(each.limit)): each for each in self.policies}
        self.headers: dict[int | None, RawHeader | None] = {
            10: _listed(_item(each) for each in self.policies),
            7: _listed(_item_without_name(each.limit) for each in self.policies),
            None: None,
        }
        self.headers[6] = self.headers[7]

    def tightest(self, decision: Decision) -> _Policy | None:
        """The limit that a decision speaks of."""
        rule = decision.rule or DEFAULT_NAME
        return self._by_limit.get((rule, id(decision.policy))) or self._alike(rule, decision.policy)

    def _alike(self, rule: str, limit: Limit) -> _Policy | None:
        """One that is not the very same object: equal, or, with other numbers, the same limit."""
        of_rule = [each for each in self.policies if each.rule == rule] or self.policies
        for each in of_rule:
            if each.limit == limit:
                return each
        for each in of_rule:
            if each.limit.identity == limit.identity:
                return each
        return of_rule[0] if of_rule else None


_known: Final[dict[tuple[AppliedRule, ...], _Known]] = {}


def _learn(applied: tuple[AppliedRule, ...]) -> _Known:
    if len(_known) >= KNOWN_MAX:
        _known.clear()
    known = _known[applied] = _Known(applied)
    return known


def _policies(applied: tuple[AppliedRule, ...]) -> Iterator[_Policy]:
    taken: set[str] = set()
    for each in applied:
        rule = each.rule or DEFAULT_NAME
        for limit in each.limits:
            name = next(name for name in _candidates(rule, each.limits, limit) if name not in taken)
            taken.add(name)
            quoted = _quoted(name)
            limit_header = (b"x-ratelimit-limit", b"%d" % limit.capacity)
            yield _Policy(name, limit, rule, limit_header, b"%b;r=" % quoted)


def _candidates(rule: str, limits: tuple[Limit, ...], limit: Limit) -> Iterator[str]:
    """Names for a limit, the best first, without end: one of them is free."""
    if len(limits) == 1:
        yield _printable(rule)
    name = f"{rule}.{limit.name or _window_text(limit.window_ns)}"
    yield _printable(name)
    name = f"{name}.{limit.algorithm}"
    yield _printable(name)
    number = 2
    while True:
        yield _printable(f"{name}.{number}")
        number += 1


def _window_text(window_ns: int) -> str:
    """A window in the largest unit of which it is a whole number: 60s, 100ms, 1500us."""
    for unit, unit_ns in (("s", NS_PER_SECOND), ("ms", 1_000_000)):
        if window_ns % unit_ns == 0:
            return f"{window_ns // unit_ns}{unit}"
    return f"{window_ns // 1_000}us"


def _printable(name: str) -> str:
    """In ASCII that a structured field may hold: the rest percent-encoded.

    >>> _printable("größe")
    'gr%C3%B6%C3%9Fe'
    """
    if name.isascii() and name.isprintable():
        return name
    encoded = name.encode("utf-8", "surrogatepass")
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"%{byte:02X}" for byte in encoded)


def _quoted(name: str) -> bytes:
    return b'"%b"' % name.replace("\\", "\\\\").replace('"', '\\"').encode("ascii")


def _item(policy: _Policy) -> bytes:
    window_s, rest = divmod(policy.limit.window_ns, NS_PER_SECOND)
    item = b"%b;q=%d" % (_quoted(policy.name), policy.limit.limit)
    return item if rest else b"%b;w=%d" % (item, window_s)


def _item_without_name(limit: Limit) -> bytes:
    # Drafts 6 and 7 ask for a window in whole seconds; a limit without one cannot be said.
    window_s, rest = divmod(limit.window_ns, NS_PER_SECOND)
    return b"" if rest else b"%d;w=%d" % (limit.limit, window_s)


def _listed(items: Iterator[bytes]) -> RawHeader | None:
    value = b""
    for item in filter(None, items):
        longer = b"%b, %b" % (value, item) if value else item
        if len(longer) > POLICY_BYTES_MAX:
            break
        value = longer
    return (b"ratelimit-policy", value) if value else None


# ── Headers ────────────────────────────────────────────────────────────────────────────────────


def raw_headers_of(ruling: CheckResult, now_ns: int, style: Style = _STYLE) -> list[RawHeader]:
    """The headers of an answer as ASGI wants them: bytes, the names in small letters."""
    decision, applied, kind, _, _ = ruling
    if kind != "limited" or decision.degraded or not decision.allowed or style.draft != 10:
        return _raw_headers_in_full(ruling, now_ns, style)
    known = _known.get(applied) or _learn(applied)
    tightest = known.only or known.tightest(decision)
    if tightest is None:
        return _raw_headers_in_full(ruling, now_ns, style)
    remaining = b"%d" % decision.remaining
    reset_after_ns = decision.reset_after_ns
    # -(a // -b) rounds up.
    state = b"%b%b;t=%d" % (tightest.start, remaining, -(reset_after_ns // -NS_PER_SECOND))
    policy = known.headers[10]
    if not style.legacy:
        return [policy, (b"ratelimit", state)] if policy else [(b"ratelimit", state)]
    reset_s = -((now_ns + reset_after_ns) // -NS_PER_SECOND)
    headers = [
        tightest.limit_header,
        (b"x-ratelimit-remaining", remaining),
        (b"x-ratelimit-reset", b"%d" % reset_s),
        (b"ratelimit", state),
    ]
    if policy:
        headers.append(policy)
    return headers


def _raw_headers_in_full(ruling: CheckResult, now_ns: int, style: Style) -> list[RawHeader]:
    """Every kind of answer in every style; the common one has a short cut above."""
    decision, applied, kind, _, _ = ruling
    if kind in {"unlimited", "blocked"}:
        return []
    if kind == "exempt":
        return [(b"x-ratelimit-policy", b"exempt")] if style.legacy else []
    known = _known.get(applied) or _learn(applied)
    is_known = kind == "limited" and not decision.degraded
    headers = _legacy_headers(decision, now_ns, is_known) if style.legacy else []
    if is_known:
        headers += _state_headers(known, decision, style)
    policy = known.headers[style.draft]
    if policy:
        headers.append(policy)
    if not decision.allowed:
        headers.append((b"retry-after", b"%d" % retry_after_seconds_of(decision)))
    return headers


def _legacy_headers(decision: Decision, now_ns: int, is_known: bool) -> list[RawHeader]:
    headers = [
        (b"x-ratelimit-limit", b"%d" % decision.limit),
        (b"x-ratelimit-remaining", b"%d" % (decision.remaining if is_known else -1)),
        (b"x-ratelimit-reset", b"%d" % _reset_seconds(decision, now_ns)),
    ]
    if not is_known:
        headers.append((b"x-ratelimit-policy", b"degraded"))
    return headers


def _state_headers(known: _Known, decision: Decision, style: Style) -> list[RawHeader]:
    """How the tightest limit stands, as the draft of that revision says it."""
    remaining = decision.remaining
    # A client that heeds this alone is to wait as long as Retry-After says.
    after_s = -(decision.reset_after_ns // -NS_PER_SECOND)
    if not decision.allowed:
        after_s = retry_after_seconds_of(decision)
    if style.draft == 10:
        tightest = known.tightest(decision)
        if tightest is None:
            return []
        return [(b"ratelimit", b"%b%d;t=%d" % (tightest.start, remaining, after_s))]
    if style.draft == 7:
        numbers = (decision.limit, remaining, after_s)
        return [(b"ratelimit", b"limit=%d, remaining=%d, reset=%d" % numbers)]
    if style.draft == 6:
        return [
            (b"ratelimit-limit", b"%d" % decision.limit),
            (b"ratelimit-remaining", b"%d" % remaining),
            (b"ratelimit-reset", b"%d" % after_s),
        ]
    return []


_NAMES: Final = {
    b"x-ratelimit-limit": "X-RateLimit-Limit",
    b"x-ratelimit-remaining": "X-RateLimit-Remaining",
    b"x-ratelimit-reset": "X-RateLimit-Reset",
    b"x-ratelimit-policy": "X-RateLimit-Policy",
    b"ratelimit": "RateLimit",
    b"ratelimit-policy": "RateLimit-Policy",
    b"ratelimit-limit": "RateLimit-Limit",
    b"ratelimit-remaining": "RateLimit-Remaining",
    b"ratelimit-reset": "RateLimit-Reset",
    b"retry-after": "Retry-After",
}


def headers_of(ruling: CheckResult, now_ns: int, style: Style = _STYLE) -> list[tuple[str, str]]:
    """The headers of an answer, with Retry-After where it is a 429 or a 503.

    `now_ns` is the Unix time. Shadow rules show nothing: their limits are not the client's.
    """
    raw = raw_headers_of(ruling, now_ns, style)
    return [(_NAMES[name], value.decode("ascii")) for name, value in raw]


def retry_after_seconds_of(decision: Decision) -> int:
    """Whole seconds until the same cost would pass, rounded up, and never 0."""
    return max(1, -(decision.retry_after_ns // -NS_PER_SECOND))


def _reset_seconds(decision: Decision, now_ns: int) -> int:
    """The Unix time in whole seconds, rounded up, from when the quota is whole."""
    return -((now_ns + decision.reset_after_ns) // -NS_PER_SECOND)


# ── Statuses and bodies ────────────────────────────────────────────────────────────────────────


def over_limit(ruling: CheckResult) -> bool:
    """For gRPC: whether the answer is OVER_LIMIT, and not OK."""
    return not ruling.decision.allowed


def status_of(ruling: CheckResult) -> int:
    """200 for who may pass; 429 for who is over a limit, 403 blocked, 503 undecided."""
    if ruling.decision.allowed:
        return 200
    return {"blocked": 403, "unavailable": 503}.get(ruling.kind, 429)


def refusal_of(ruling: CheckResult, now_ns: int, style: Style = _STYLE) -> Answer:
    """The whole response to a request that may not pass."""
    return problem_answer(problem_of(ruling, now_ns), headers_of(ruling, now_ns, style))


def problem_of(ruling: CheckResult, now_ns: int) -> dict[str, object]:
    """The body of a refusal, before it is JSON: the members of RFC 9457, and `error`."""
    if ruling.kind == "blocked":
        detail = "This client is blocked here; ask whoever runs the service to lift it."
        return problem(403, "BLOCKED", detail)
    decision = ruling.decision
    wait_s = retry_after_seconds_of(decision)
    details: dict[str, object] = {
        "limit": decision.policy.limit,
        "window_seconds": window_seconds_of(decision.policy),
        "retry_after_seconds": wait_s,
    }
    if ruling.kind == "unavailable":
        return problem(
            503,
            "LIMITER_UNAVAILABLE",
            f"The limits of this request cannot be looked up at the moment; "
            f"try again in {_seconds(wait_s)}.",
            kind=REDUCED_CAPACITY,
            title="Temporarily unable to decide",
            details=details,
        )
    members = problem(
        429,
        "RATE_LIMIT_EXCEEDED",
        f"The limit of {_limit_text(decision.policy)} has no room for this request; "
        f"try again in {_seconds(wait_s)}.",
        kind=QUOTA_EXCEEDED,
        title="Quota exceeded",
        details={**details, "reset_at": _reset_at(decision, now_ns)},
    )
    members["violated-policies"] = [_tightest_name(ruling)]
    return members


def _tightest_name(ruling: CheckResult) -> str:
    known = _known.get(ruling.applied) or _learn(ruling.applied)
    tightest = known.tightest(ruling.decision)
    return tightest.name if tightest else _printable(ruling.decision.rule or DEFAULT_NAME)


def _limit_text(limit: Limit) -> str:
    burst = f" (at most {limit.capacity} at once)" if limit.capacity != limit.limit else ""
    return f"{limit.limit:,} per {_seconds(window_seconds_of(limit))}{burst}"


def _seconds(seconds: float) -> str:
    return "1 second" if seconds == 1 else f"{seconds:,} seconds"


def _reset_at(decision: Decision, now_ns: int) -> str:
    seconds = min(max(_reset_seconds(decision, now_ns), 0), _RESET_SECONDS_MAX)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
