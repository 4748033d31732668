"""Replies to Envoy: a code for each descriptor, headers for the client, and a body for a denial.

A request is over the limit if one of its descriptors is. The headers come from `web/answers.py`, as
everywhere: the tightest limit of all descriptors, and every limit that applied. Envoy sends a
client that is over the limit one status for every reason (429, or its `rate_limited_status`), so
the body has 429 too, and the reason in `error.code`.

A descriptor that cannot be counted, or that costs more than its limit can ever hold, is over the
limit. An error would let the request pass, unless Envoy is configured otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import CapacityError, InvalidCost, InvalidKey
from ratekeeper.core.model import CheckResult, Limit, ResultKind
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.service.envoy.protocol import wire
from ratekeeper.service.envoy.protocol.messages import RateLimitResponse
from ratekeeper.web.answers import (
    HttpAnswer,
    Style,
    capacity_answer,
    denial_answer,
    invalid_request_answer,
    raw_headers_of,
)

# The result for a descriptor.
Outcome = CheckResult | CapacityError | InvalidCost | InvalidKey

RateLimit = RateLimitResponse.RateLimit

OK: Final = RateLimitResponse.OK
OVER_LIMIT: Final = RateLimitResponse.OVER_LIMIT
TOO_MANY_REQUESTS: Final = 429

# Limits in Envoy's form, by their numbers and their rule; when there are more, all are dropped.
LIMITS_MAX: Final = 4_096
_limits: dict[tuple[int, int, str], bytes] = {}

# From the largest: a window is written in the largest unit that divides it.
_UNITS: Final = (
    (RateLimit.YEAR, 365 * 86_400 * NS_PER_SECOND),
    (RateLimit.MONTH, 30 * 86_400 * NS_PER_SECOND),
    (RateLimit.WEEK, 7 * 86_400 * NS_PER_SECOND),
    (RateLimit.DAY, 86_400 * NS_PER_SECOND),
    (RateLimit.HOUR, 3_600 * NS_PER_SECOND),
    (RateLimit.MINUTE, 60 * NS_PER_SECOND),
    (RateLimit.SECOND, NS_PER_SECOND),
)
# Of several results, the kind that comes first here is reported.
_KINDS: Final[tuple[ResultKind, ...]] = ("blocked", "unavailable", "limited", "exempt", "unlimited")


def reply_of(outcomes: Sequence[Outcome], now_ns: int, style: Style) -> bytes:
    """Return the reply, with one status for each outcome. `now_ns` is the Unix time."""
    statuses = [_status_of(each) for each in outcomes]
    refusal = _failure_of(outcomes)
    if refusal is None:
        result = merged([each for each in outcomes if isinstance(each, CheckResult)])
        if result.decision.allowed:
            headers = raw_headers_of(result, now_ns, style)
            return wire.rate_limit_response(OK, statuses, headers)
        refusal = denial_answer(result, now_ns, style)
    refusal = _as_429(refusal)
    headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers]
    return wire.rate_limit_response(OVER_LIMIT, statuses, headers, refusal.body)


def _failure_of(outcomes: Sequence[Outcome]) -> HttpAnswer | None:
    """Return the answer for the first descriptor that could not be decided."""
    for each in outcomes:
        if isinstance(each, CapacityError):
            return capacity_answer(each)
        if isinstance(each, InvalidCost | InvalidKey):
            return invalid_request_answer(each)
    return None


def _as_429(answer: HttpAnswer) -> HttpAnswer:
    if answer.status == TOO_MANY_REQUESTS:
        return answer
    members = {**json.loads(answer.body), "status": TOO_MANY_REQUESTS}
    body = json.dumps(members, separators=(",", ":")).encode("ascii")
    return HttpAnswer(TOO_MANY_REQUESTS, answer.headers, body)


def merged(results: Sequence[CheckResult]) -> CheckResult:
    """Return one result for several descriptors: the tightest limit, and all rules that applied.

    If a limit applied to one of them, "exempt" and "unlimited" are not reported. "blocked" always
    is.
    """
    if len(results) == 1:
        return results[0]
    kind = min((each.kind for each in results), key=_KINDS.index)
    speaking = [each for each in results if each.kind == kind]
    denied = [each for each in speaking if not each.decision.allowed]
    # Each rule once, even if it applied to several descriptors.
    applied = dict.fromkeys(applied for each in speaking for applied in each.applied)
    return CheckResult(
        combine_decisions([each.decision for each in denied or speaking]),
        tuple(applied),
        kind,
        tuple(dict.fromkeys(rule for each in results for rule in each.shadow_denied)),
    )


def _status_of(outcome: Outcome) -> bytes:
    if isinstance(outcome, CheckResult):
        decision = outcome.decision
        code = OK if decision.allowed else OVER_LIMIT
        if outcome.kind != "limited" or decision.degraded:
            return wire.descriptor_status(code)  # there is no limit, or its state is unknown
        seconds, nanos = divmod(decision.reset_after_ns, NS_PER_SECOND)
        limit = _known_limit(decision.policy, decision.rule)
        return wire.descriptor_status(code, limit, decision.remaining, seconds, nanos)
    if isinstance(outcome, CapacityError):
        return wire.descriptor_status(OVER_LIMIT, _known_limit(outcome.limit, ""))
    return wire.descriptor_status(OVER_LIMIT)


def _known_limit(limit: Limit, rule: str) -> bytes:
    key = limit.limit, limit.window_ns, rule
    found = _limits.get(key)
    if found is None:
        if len(_limits) >= LIMITS_MAX:
            _limits.clear()
        found = _limits[key] = limit_of(limit, rule)
    return found


def limit_of(limit: Limit, rule: str) -> bytes:
    """Return a limit in Envoy's form: requests per unit, or per several units.

    It is the rate, without the burst. `limit_remaining` may therefore be higher.
    A window that is not in whole seconds has no unit.
    """
    for unit, unit_ns in _UNITS:
        times, rest = divmod(limit.window_ns, unit_ns)
        if times and not rest:
            return wire.rate_limit(limit.limit, unit, rule, times)
    return wire.rate_limit(limit.limit, RateLimit.UNKNOWN, rule, 1)
