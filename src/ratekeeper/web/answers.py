"""Turn a CheckResult into headers, a status and a body. Pure: no clock, no I/O.

This is the only module that knows the names of the headers. The middleware, the service and Envoy's
replies all use it.

**Headers.** `X-RateLimit-Limit`, `-Remaining` and `-Reset` describe the tightest limit, because
that limit decides what the client may do next. `RateLimit-Policy` lists every limit that applied,
and `RateLimit` gives the state of the tightest, in the syntax of the IETF draft (structured
fields):

    X-RateLimit-Limit: 100                 RateLimit-Policy: "orders.1s";q=10;w=1,
    X-RateLimit-Remaining: 73                                "orders.60s";q=100;w=60
    X-RateLimit-Reset: 1767225636          RateLimit: "orders.60s";r=73;t=36

`X-RateLimit-Limit` and `limit` in every body are `decision.limit`, the most that can remain.
`quota` and `window_seconds` in a body, and `q` and `w` in a header, are the rate. docs/answers.md
defines all numbers.

A rule with one limit is named by its id. A rule with several limits adds the name or the window of
each limit. Names are unique in a response, and they are valid structured fields for any rule id.

**Rounding.** Every time is rounded up to whole seconds, so a client that waits for the whole
Retry-After is allowed. A reset time counts from the decision's own time (`decided_ns`): a clock
that is read later is past it, and the end of a fixed window, a whole second, would be rounded up to
the next one. `now_ns` is used only for a decision that no store made, in an outage.

**Bodies.** A denial is problem JSON (RFC 9457): the members of the standard (`type`, `title`,
`status`, `detail`) and `error`, with a stable code, a message and details in numbers. `detail` is a
sentence that the reader can act on. The body is ASCII, whatever a rule or a key is called.

**Speed.** This runs on every request. Everything that depends only on the applied rules is computed
once and cached by them, in a dict that is emptied when it is full; four numbers are left to print.
The two times are the same for many requests in a row, so each limit keeps the last ones printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, Literal, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import (
    CapacityError,
    ConfigError,
    SlotLost,
    StoreError,
    StoreTimeout,
    show,
)
from ratekeeper.core.model import (
    DEFAULT_NAME,
    IN_FLIGHT,
    AppliedRule,
    CheckResult,
    Decision,
    Limit,
    PenaltyKind,
)

__all__ = [
    "Denial",
    "Header",
    "HttpAnswer",
    "RawHeader",
    "Style",
    "allowed_headers",
    "as_text",
    "capacity_answer",
    "denial_answer",
    "error_answer",
    "headers_beside",
    "headers_of",
    "invalid_request_answer",
    "problem",
    "problem_answer",
    "problem_of",
    "raw_headers_of",
    "retry_after_seconds_of",
    "status_of",
    "unavailable_answer",
]

# Sets of applied rules whose headers are cached. A rule document has about as many as it has rules,
# tiers and overrides. Each takes about 1 kB.
KNOWN_MAX: Final = 4_096
# Servers and clients reject headers of 8 kB and more. Limits that do not fit are not listed.
POLICY_BYTES_MAX: Final = 4_096
DETAIL_LENGTH_MAX: Final = 1_000
# Retry-After of a failure that is not about a limit.
UNAVAILABLE_SECONDS: Final = 1
_RESET_SECONDS_MAX: Final = 253_402_300_799  # the last second of the year 9999
# Larger integers lose precision in readers whose numbers are doubles.
_NUMBER_MAX: Final = 2**53
_ALMOST_A_SECOND_NS: Final = NS_PER_SECOND - 1

Header = tuple[str, str]
RawHeader = tuple[bytes, bytes]

RETRY_AFTER: Final = "Retry-After"
NODE: Final = "X-Ratekeeper-Node"
_LIMIT_HEADERS: Final = (
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
    "X-RateLimit-Policy",
    "RateLimit",
    "RateLimit-Policy",
    "RateLimit-Limit",
    "RateLimit-Remaining",
    "RateLimit-Reset",
)
# From the raw form, which has lower-case names as ASGI requires.
_NAMES: Final = {name.lower().encode(): name for name in (*_LIMIT_HEADERS, RETRY_AFTER, NODE)}
_LIMIT_NAMES: Final = frozenset(name.lower().encode() for name in _LIMIT_HEADERS)
# The usual spellings of all these names, so that an ASGI response is searched without lower().
SPELLINGS: Final = frozenset(
    spelling.encode() for name in _NAMES.values() for spelling in (name, name.lower(), name.title())
)

PROBLEM_CONTENT_TYPE: Final = "application/problem+json"
# The problem types that the draft of the RateLimit headers registers, and the default type.
QUOTA_EXCEEDED: Final = "https://iana.org/assignments/http-problem-types#quota-exceeded"
ABNORMAL_USAGE: Final = "https://iana.org/assignments/http-problem-types#abnormal-usage-detected"
REDUCED_CAPACITY: Final = (
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
)
BLANK: Final = "about:blank"

DRAFTS: Final = (10, 7, 6, None)
_NODE: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True)
class Style:
    """The headers to send.

    `draft`   the revision of the IETF draft: 10 (`RateLimit: "orders";r=73;t=36`), 7 (`RateLimit:
              limit=100, remaining=73, reset=36`), 6 (`RateLimit-Remaining: 73` and so on), or None
              to send none of them.
    `legacy`  True to send `X-RateLimit-…`.
    `node`    the value of `X-Ratekeeper-Node` on every answer that a limit or a list decided; "" to
              send none. None: an integration sends RATEKEEPER_NODE_ID, or a digest of the host
              name: it names the node, and clients cannot find the host name with it.
    """

    draft: Literal[10, 7, 6] | None = 10
    legacy: bool = True
    node: str | None = None
    node_headers: tuple[RawHeader, ...] = field(default=(), init=False, repr=False, compare=False)
    is_usual: bool = field(default=True, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.draft not in DRAFTS or isinstance(self.draft, bool):
            raise ConfigError(
                f"draft={show(self.draft)} is not a known revision; choose 10, 7, 6 or None"
            )
        if not isinstance(self.legacy, bool):
            raise ConfigError(f"legacy={show(self.legacy)} is not True or False")
        object.__setattr__(self, "is_usual", self.draft == 10 and self.legacy)
        if self.node:
            if not isinstance(self.node, str) or not _NODE.fullmatch(self.node):
                raise ConfigError(
                    f"node={show(self.node)} is not 1 to 64 letters, digits and . _ : -; "
                    f'for example node="eu-1"'
                )
            header = (b"x-ratekeeper-node", self.node.encode("ascii"))
            object.__setattr__(self, "node_headers", (header,))


_STYLE: Final = Style()


class HttpAnswer(NamedTuple):
    """A whole response. The server adds Content-Length."""

    status: int
    headers: list[Header]
    body: bytes

    def raw_headers(self) -> list[RawHeader]:
        """Return the headers as ASGI takes them: bytes, with lower-case names."""
        return [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self.headers
        ]


# ── Cached by the applied rules ────────────────────────────────────────────────────────────────


class _HeaderPolicy:
    """One limit of one rule, as the headers show it."""

    __slots__ = ("after", "limit", "limit_header", "name", "reset", "rule", "start")

    def __init__(self, name: str, limit: Limit, rule: str) -> None:
        self.name = name
        self.limit = limit
        self.rule = rule
        self.limit_header = _limit_header(limit.capacity)
        self.start = b"%b;r=" % _quoted(name)
        """The start of the `RateLimit` header, up to the remaining number."""
        # The times that were printed last. Two threads may replace them at once: each uses the
        # value that it has read or made itself.
        self.after = -1, b""
        self.reset: tuple[int, RawHeader] = -1, (b"", b"")


class _PolicyHeaders:
    """The parts of the headers that depend only on the applied rules."""

    __slots__ = ("_by_limit", "applied", "headers", "only", "policies", "usual")

    def __init__(self, applied: tuple[AppliedRule, ...]) -> None:
        self.applied = applied  # keeps the limits alive, whose ids are the keys of _by_limit
        self.policies = tuple(_policies(applied))
        self.only = self.policies[0] if len(self.policies) == 1 else None
        self._by_limit = {(each.rule, id(each.limit)): each for each in self.policies}
        self.headers: dict[int | None, RawHeader | None] = {
            10: _listed(_item(each) for each in self.policies),
            7: _listed(_item_without_name(each.limit) for each in self.policies),
            None: None,
        }
        self.headers[6] = self.headers[7]
        usual = self.headers[10]
        self.usual = () if usual is None else (usual,)

    def tightest(self, decision: Decision) -> _HeaderPolicy | None:
        """Return the limit that a decision describes."""
        rule = decision.rule or DEFAULT_NAME
        return self._by_limit.get((rule, id(decision.policy))) or self._similar(
            rule, decision.policy
        )

    def _similar(self, rule: str, limit: Limit) -> _HeaderPolicy | None:
        """Find a limit that is another object: an equal one, or the same with other numbers."""
        of_rule = [each for each in self.policies if each.rule == rule] or self.policies
        for each in of_rule:
            if each.limit == limit:
                return each
        for each in of_rule:
            if each.limit.identity == limit.identity:
                return each
        return of_rule[0] if of_rule else None


_known: Final[dict[tuple[AppliedRule, ...], _PolicyHeaders]] = {}


def _learn(applied: tuple[AppliedRule, ...]) -> _PolicyHeaders:
    if len(_known) >= KNOWN_MAX:
        _known.clear()
    known = _known[applied] = _PolicyHeaders(applied)
    return known


def _policies(applied: tuple[AppliedRule, ...]) -> Iterator[_HeaderPolicy]:
    taken: set[str] = set()
    for each in applied:
        rule = each.rule or DEFAULT_NAME
        for limit in each.limits:
            name = next(name for name in _candidates(rule, each.limits, limit) if name not in taken)
            taken.add(name)
            yield _HeaderPolicy(name, limit, rule)


def _limit_header(limit: int) -> RawHeader:
    return b"x-ratelimit-limit", b"%d" % limit


def _candidates(rule: str, limits: tuple[Limit, ...], limit: Limit) -> Iterator[str]:
    """Yield names for a limit, the best first, without end: one of them is unused."""
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
    """Return a window in the largest unit that it is a multiple of: 60s, 100ms, 1500us."""
    for unit, unit_ns in (("s", NS_PER_SECOND), ("ms", 1_000_000)):
        if window_ns % unit_ns == 0:
            return f"{window_ns // unit_ns}{unit}"
    return f"{window_ns // 1_000}us"


def _printable(name: str) -> str:
    """Return a name in the ASCII of structured fields, other characters percent-encoded.

    >>> _printable("größe")
    'gr%C3%B6%C3%9Fe'
    """
    if name.isascii() and name.isprintable():
        return name
    encoded = name.encode("utf-8", "surrogatepass")
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"%{byte:02X}" for byte in encoded)


def _quoted(name: str) -> bytes:
    return b'"%b"' % name.replace("\\", "\\\\").replace('"', '\\"').encode("ascii")


def _item(policy: _HeaderPolicy) -> bytes:
    window_s, rest = divmod(policy.limit.window_ns, NS_PER_SECOND)
    item = b"%b;q=%d" % (_quoted(policy.name), policy.limit.limit)
    return (item if rest else b"%b;w=%d" % (item, window_s)) + _capacity_parameter(policy.limit)


def _item_without_name(limit: Limit) -> bytes:
    # Drafts 6 and 7 need a window in whole seconds. Other limits cannot be listed.
    window_s, rest = divmod(limit.window_ns, NS_PER_SECOND)
    return b"" if rest else b"%d;w=%d" % (limit.limit, window_s) + _capacity_parameter(limit)


def _capacity_parameter(limit: Limit) -> bytes:
    """Return the parameter that says why X-RateLimit-Limit differs from the quota `q`."""
    return b"" if limit.capacity == limit.limit else b";capacity=%d" % limit.capacity


def _listed(items: Iterator[bytes]) -> RawHeader | None:
    value = b""
    for item in filter(None, items):
        longer = b"%b, %b" % (value, item) if value else item
        if len(longer) > POLICY_BYTES_MAX:
            break
        value = longer
    return (b"ratelimit-policy", value) if value else None


# ── Headers ────────────────────────────────────────────────────────────────────────────────────


def raw_headers_of(result: CheckResult, now_ns: int, style: Style = _STYLE) -> list[RawHeader]:
    """Return the headers of an answer as ASGI takes them: bytes, with lower-case names."""
    decision, applied, kind, _, _, _ = result
    headers = None
    if kind == "limited":
        headers = allowed_headers(decision, applied, decision.decided_ns or now_ns, style)
    return _raw_headers_in_full(result, now_ns, style) if headers is None else headers


def allowed_headers(
    decision: Decision, applied: tuple[AppliedRule, ...], at_ns: int, style: Style
) -> list[RawHeader] | None:
    """Return the headers of a request that limits allow, in the default style; else None.

    `at_ns` is the time of the decision.
    """
    known = _known.get(applied) or _learn(applied)
    tightest = known.only or known.tightest(decision)
    if tightest is None or not style.is_usual or decision.degraded or not decision.allowed:
        return None
    remaining = b"%d" % decision.remaining
    after_ns = decision.reset_after_ns + _ALMOST_A_SECOND_NS  # rounds up below
    after_s = after_ns // NS_PER_SECOND
    after = tightest.after
    if after_s != after[0]:
        after = tightest.after = after_s, b";t=%d" % after_s
    reset_s = (at_ns + after_ns) // NS_PER_SECOND
    reset = tightest.reset
    if reset_s != reset[0]:
        reset = tightest.reset = reset_s, (b"x-ratelimit-reset", b"%d" % reset_s)
    return [
        tightest.limit_header if not decision.granted else _limit_header(decision.limit),
        (b"x-ratelimit-remaining", remaining),
        reset[1],
        (b"ratelimit", tightest.start + remaining + after[1]),
        *known.usual,
        *style.node_headers,
    ]


def _raw_headers_in_full(result: CheckResult, now_ns: int, style: Style) -> list[RawHeader]:
    """Return the headers of any answer in any style. `raw_headers_of` has a shortcut."""
    decision, applied, kind, _, _, _ = result
    if kind == "unlimited":
        return []
    if kind == "blocked":
        return [*style.node_headers]
    if kind == "exempt":
        exempt = [(b"x-ratelimit-policy", b"exempt")] if style.legacy else []
        return [*exempt, *style.node_headers]
    known = _known.get(applied) or _learn(applied)
    is_known = kind == "limited" and not decision.degraded
    headers = _legacy_headers(decision, now_ns, is_known) if style.legacy else []
    if is_known:
        headers += _state_headers(known, decision, style)
    policy = known.headers[style.draft]
    if policy:
        headers.append(policy)
    if not decision.allowed:
        headers.append(_retry_after(retry_after_seconds_of(decision)))
    headers += style.node_headers
    return headers


def _retry_after(seconds: int) -> RawHeader:
    return b"retry-after", b"%d" % seconds


def _legacy_headers(decision: Decision, now_ns: int, is_known: bool) -> list[RawHeader]:
    headers = [
        _limit_header(decision.limit),
        (b"x-ratelimit-remaining", b"%d" % (decision.remaining if is_known else -1)),
        (b"x-ratelimit-reset", b"%d" % _reset_seconds(decision, now_ns)),
    ]
    if not is_known:
        headers.append((b"x-ratelimit-policy", b"degraded"))
    return headers


def _state_headers(known: _PolicyHeaders, decision: Decision, style: Style) -> list[RawHeader]:
    """Return the state of the tightest limit in the syntax of the draft's revision."""
    remaining = decision.remaining
    # A client that reads only this header must wait as long as Retry-After says.
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


def headers_of(result: CheckResult, now_ns: int, style: Style = _STYLE) -> list[Header]:
    """Return the headers of an answer, with Retry-After on a 429 or a 503.

    `now_ns` is the Unix time, for a decision that no store made. Rules in shadow mode are not
    shown: they do not limit the client.
    """
    return as_text(raw_headers_of(result, now_ns, style))


def as_text(headers: list[RawHeader]) -> list[Header]:
    """Return headers of ours as text, with their usual names."""
    return [(_NAMES[name], value.decode("ascii")) for name, value in headers]


def retry_after_seconds_of(decision: Decision) -> int:
    """Return whole seconds until the same cost would be allowed, rounded up, at least 1."""
    return max(1, -(decision.retry_after_ns // -NS_PER_SECOND))


def _reset_seconds(decision: Decision, now_ns: int) -> int:
    """Return the Unix time in whole seconds, rounded up, at which the quota is full again."""
    return -(((decision.decided_ns or now_ns) + decision.reset_after_ns) // -NS_PER_SECOND)


def headers_beside(names: Iterable[bytes], ours: list[RawHeader]) -> list[RawHeader]:
    """Return those of our headers that a response with these `names` still needs.

    If the application sends any header about limits itself, none of ours is added.
    """
    known = {name.lower() for name in names}
    if not known.isdisjoint(_LIMIT_NAMES):
        return []
    return [header for header in ours if header[0] not in known]


# ── Statuses and bodies ────────────────────────────────────────────────────────────────────────


def status_of(result: CheckResult) -> int:
    """Return 200 if the request is allowed; 429 over a limit, 403 blocked, 503 undecided."""
    if result.decision.allowed:
        return 200
    return {"blocked": 403, "unavailable": 503}.get(result.kind, 429)


def denial_answer(result: CheckResult, now_ns: int, style: Style = _STYLE) -> HttpAnswer:
    """Return the whole response to a denied request."""
    return problem_answer(problem_of(result, now_ns), headers_of(result, now_ns, style))


class Denial:
    """A denied request, as `on_limit` and `on_unavailable` receive it.

    With `5/minute`, the 6th of 6 requests at one instant has `status` 429, `retry_after` 12 and
    `rule` "default".
    """

    __slots__ = ("_now_ns", "_style", "result")

    def __init__(self, result: CheckResult, now_ns: int, style: Style = _STYLE) -> None:
        self.result = result
        """The decision with all rules that applied."""
        self._now_ns = now_ns
        self._style = style

    @property
    def status(self) -> int:
        """The status of the default response: 429 for `on_limit`, 503 for `on_unavailable`."""
        return status_of(self.result)

    @property
    def decision(self) -> Decision:
        """The decision: the tightest limit, `remaining`, `reset_after`, `degraded`."""
        return self.result.decision

    @property
    def retry_after(self) -> int:
        """Whole seconds until the same request would be allowed, as in the Retry-After header."""
        return retry_after_seconds_of(self.result.decision)

    @property
    def rule(self) -> str:
        """The name of the limit that denied the request, as in the headers."""
        return _tightest_name(self.result)

    @property
    def message(self) -> str:
        """A sentence for the client: which limit has no room, and when to try again."""
        return str(problem_of(self.result, self._now_ns)["detail"])

    @property
    def answer(self) -> HttpAnswer:
        """The default response, to return it for some requests or with changes."""
        return denial_answer(self.result, self._now_ns, self._style)

    def __repr__(self) -> str:
        return f"<Denial {self.status}: {self.decision!r}>"


def capacity_answer(error: CapacityError) -> HttpAnswer:
    """Return a 422: the cost exceeds the capacity. It has no Retry-After, as no wait helps."""
    limit = error.limit
    details: dict[str, object] = {"limit": error.most, **_rate_details(limit)}
    if isinstance(error.cost, int) and abs(error.cost) <= _NUMBER_MAX:
        details["cost"] = error.cost
    detail = (
        f"This request costs {show(error.cost)}, but its limit holds at most {error.most}, so "
        f"waiting does not help; split it into requests that cost at most {error.most} each."
    )
    return problem_answer(problem(422, "COST_EXCEEDS_CAPACITY", detail, details=details), [])


def invalid_request_answer(error: ConfigError) -> HttpAnswer:
    """Return a 400: the key or the cost of the request is invalid, and why."""
    return problem_answer(problem(400, "INVALID_REQUEST", str(error)), [])


def unavailable_answer(code: str, detail: str) -> HttpAnswer:
    """Return a 503 for a failure that may be over in a second, with Retry-After."""
    return problem_answer(problem(503, code, detail), as_text([_retry_after(UNAVAILABLE_SECONDS)]))


def error_answer(error: Exception) -> HttpAnswer | None:
    """Return the response to a request that raised this error; None if it has none of its own."""
    if isinstance(error, CapacityError):
        return capacity_answer(error)
    if isinstance(error, ConfigError):
        return invalid_request_answer(error)
    if isinstance(error, StoreError):
        code = "STORE_TIMEOUT" if isinstance(error, StoreTimeout) else "STORE_UNAVAILABLE"
        return unavailable_answer(code, str(error))
    if isinstance(error, SlotLost):
        return problem_answer(problem(409, "SLOT_LOST", str(error)), [])
    return None


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    kind: str = BLANK,
    title: str = "",
    details: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the members of a problem, in reading order.

    `kind` becomes `type`. A problem of type about:blank has the status's phrase as its title.

    >>> problem(404, "NOT_FOUND", "there is no /v2; try /v1")["title"]
    'Not Found'
    """
    text = _clean(detail)
    return {
        "type": kind,
        "title": title or HTTPStatus(status).phrase,
        "status": status,
        "detail": text,
        "error": {"code": code, "message": text, "details": dict(details or {})},
    }


def problem_answer(members: Mapping[str, object], headers: list[Header]) -> HttpAnswer:
    """Return a problem as a response, with `headers` before those that every problem has."""
    body = json.dumps(members, separators=(",", ":")).encode("ascii")
    status = members["status"]
    assert isinstance(status, int), "problem() puts it there"  # noqa: S101 - our own bug
    return HttpAnswer(
        status,
        [*headers, ("Content-Type", PROBLEM_CONTENT_TYPE), ("Cache-Control", "no-store")],
        body,
    )


def problem_of(result: CheckResult, now_ns: int) -> dict[str, object]:
    """Return the body of a denial before it is JSON: the members of RFC 9457, and `error`."""
    if result.kind == "blocked":
        detail = "This client is blocked; ask the operator of the service to lift the block."
        return problem(403, "BLOCKED", detail)
    decision = result.decision
    wait_s = retry_after_seconds_of(decision)
    details: dict[str, object] = {
        "limit": decision.limit,
        **_rate_details(decision.policy),
        "retry_after_seconds": wait_s,
    }
    if result.kind == "unavailable":
        return problem(
            503,
            "LIMITER_UNAVAILABLE",
            f"The limits of this request cannot be checked at the moment; "
            f"try again in {_seconds(wait_s)}.",
            kind=REDUCED_CAPACITY,
            title="Temporarily unable to decide",
            details=details,
        )
    details["reset_at"] = _reset_at(decision, now_ns)
    if decision.penalty is not None:
        members = _penalty_problem(decision.penalty, wait_s, details)
    else:
        members = problem(
            429,
            "RATE_LIMIT_EXCEEDED",
            f"The limit of {_limit_text(decision.policy)} has no room for this request; "
            f"try again in {_seconds(wait_s)}.",
            kind=QUOTA_EXCEEDED,
            title="Quota exceeded",
            details=details,
        )
    members["violated-policies"] = [_tightest_name(result)]
    return members


def _penalty_problem(
    penalty: PenaltyKind, wait_s: int, details: Mapping[str, object]
) -> dict[str, object]:
    """Return the body for a client that did not wait after a denial."""
    name = "a cool-down" if penalty == "cooldown" else "a block"
    return problem(
        429,
        "RATE_LIMIT_EXCEEDED",
        f"This client is in {name}, because it did not wait after denied requests; "
        f"try again in {_seconds(wait_s)}.",
        kind=ABNORMAL_USAGE,
        title="Abnormal usage detected",
        details={**details, "penalty": penalty},
    )


def _tightest_name(result: CheckResult) -> str:
    known = _known.get(result.applied) or _learn(result.applied)
    tightest = known.tightest(result.decision)
    return tightest.name if tightest else _printable(result.decision.rule or DEFAULT_NAME)


def _rate_details(limit: Limit) -> dict[str, float]:
    """Return the rate of a limit: `quota` units every `window_seconds`."""
    return {"quota": limit.limit, "window_seconds": _window_seconds(limit)}


def _limit_text(limit: Limit) -> str:
    if limit.algorithm == IN_FLIGHT:
        return f"{limit.limit:,} requests at once"
    burst = f" (at most {limit.capacity} at once)" if limit.capacity != limit.limit else ""
    return f"{limit.limit:,} per {_seconds(_window_seconds(limit))}{burst}"


def _window_seconds(limit: Limit) -> float:
    """Return the window in seconds, as an integer if it is whole."""
    whole, rest = divmod(limit.window_ns, NS_PER_SECOND)
    return limit.window_ns / NS_PER_SECOND if rest else whole


def _seconds(seconds: float) -> str:
    return "1 second" if seconds == 1 else f"{seconds:,} seconds"


def _reset_at(decision: Decision, now_ns: int) -> str:
    seconds = min(max(_reset_seconds(decision, now_ns), 0), _RESET_SECONDS_MAX)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _clean(text: str) -> str:
    """Return text that every JSON reader accepts: lone surrogates are escaped."""
    if len(text) > DETAIL_LENGTH_MAX:
        text = f"{text[: DETAIL_LENGTH_MAX - 1]}…"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
