"""What Envoy is answered: a code for each descriptor, headers for the client, and a body for 429.

The request is over the limit if one of its descriptors is. The headers are those of every other way
in (`web/answers.py`): the tightest limit of all descriptors, and every limit that applied. Envoy
sends a client that is over the limit one status whatever the reason (429, or its own
`rate_limited_status`), so the body says 429 too, and the reason in `error.code`.

A descriptor that cannot be counted, or that costs more than its limit can ever hold, is over the
limit. As an error it would be Envoy's to decide, and Envoy lets errors pass unless told otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import CapacityError, InvalidKey
from tollkeeper.core.model import CheckResult, Limit, ResultKind
from tollkeeper.decide.combine import combine_decisions
from tollkeeper.service.envoy.protocol.messages import RateLimitResponse
from tollkeeper.web.answers import (
    HttpAnswer,
    Style,
    capacity_answer,
    denial_answer,
    invalid_request_answer,
    is_over_limit,
    raw_headers_of,
)

# What became of a descriptor.
Outcome = CheckResult | CapacityError | InvalidKey

RateLimit = RateLimitResponse.RateLimit
Status = RateLimitResponse.DescriptorStatus

OK: Final = RateLimitResponse.OK
OVER_LIMIT: Final = RateLimitResponse.OVER_LIMIT
TOO_MANY_REQUESTS: Final = 429

# From the largest: a window is told in the largest unit that it is a whole number of.
_UNITS: Final = (
    (RateLimit.YEAR, 365 * 86_400 * NS_PER_SECOND),
    (RateLimit.MONTH, 30 * 86_400 * NS_PER_SECOND),
    (RateLimit.WEEK, 7 * 86_400 * NS_PER_SECOND),
    (RateLimit.DAY, 86_400 * NS_PER_SECOND),
    (RateLimit.HOUR, 3_600 * NS_PER_SECOND),
    (RateLimit.MINUTE, 60 * NS_PER_SECOND),
    (RateLimit.SECOND, NS_PER_SECOND),
)
# Which kind of ruling speaks for several: who is blocked hears that first.
_KINDS: Final[tuple[ResultKind, ...]] = ("blocked", "unavailable", "limited", "exempt", "unlimited")


def response_of(outcomes: Sequence[Outcome], now_ns: int, style: Style) -> RateLimitResponse:
    """The whole answer, one status for each outcome. `now_ns` is the Unix time."""
    response = RateLimitResponse(overall_code=OK)
    # Messages are added to and filled in place: one that is handed over is copied.
    for each in outcomes:
        _fill(response.statuses.add(), each)
    refusal = _failure_of(outcomes)
    if refusal is None:
        ruling = merged([each for each in outcomes if isinstance(each, CheckResult)])
        if not is_over_limit(ruling):
            for name, value in raw_headers_of(ruling, now_ns, style):
                response.response_headers_to_add.add(
                    key=name.decode("ascii"), value=value.decode("ascii")
                )
            return response
        refusal = denial_answer(ruling, now_ns, style)
    response.overall_code = OVER_LIMIT
    refusal = _as_429(refusal)
    for header, text in refusal.headers:
        response.response_headers_to_add.add(key=header.lower(), value=text)
    response.raw_body = refusal.body
    return response


def _failure_of(outcomes: Sequence[Outcome]) -> HttpAnswer | None:
    """The refusal of the first descriptor that could not be decided on."""
    for each in outcomes:
        if isinstance(each, CapacityError):
            return capacity_answer(each)
        if isinstance(each, InvalidKey):
            return invalid_request_answer(each)
    return None


def _as_429(answer: HttpAnswer) -> HttpAnswer:
    if answer.status == TOO_MANY_REQUESTS:
        return answer
    members = {**json.loads(answer.body), "status": TOO_MANY_REQUESTS}
    body = json.dumps(members, separators=(",", ":")).encode("ascii")
    return HttpAnswer(TOO_MANY_REQUESTS, answer.headers, body)


def merged(rulings: Sequence[CheckResult]) -> CheckResult:
    """One ruling on a request with several descriptors: the tightest speaks, all limits are named.

    A list or the lack of rules speaks only where no limit has a say; but who is blocked is blocked.
    """
    if len(rulings) == 1:
        return rulings[0]
    kind = min((each.kind for each in rulings), key=_KINDS.index)
    speaking = [each for each in rulings if each.kind == kind]
    denied = [each for each in speaking if not each.decision.allowed]
    # Each rule once, though several descriptors met it.
    applied = dict.fromkeys(applied for each in speaking for applied in each.applied)
    return CheckResult(
        combine_decisions([each.decision for each in denied or speaking]),
        tuple(applied),
        kind,
        tuple(dict.fromkeys(rule for each in rulings for rule in each.shadow_denied)),
    )


def _fill(status: Status, outcome: Outcome) -> None:
    status.code = OVER_LIMIT
    if isinstance(outcome, CapacityError):
        tell(outcome.limit, "", status.current_limit)
    elif isinstance(outcome, CheckResult):
        decision = outcome.decision
        if decision.allowed:
            status.code = OK
        if outcome.kind != "limited" or decision.degraded:
            return  # there is no limit, or nobody knows what remains of it
        tell(decision.policy, decision.rule, status.current_limit)
        status.limit_remaining = decision.remaining
        seconds, nanos = divmod(decision.reset_after_ns, NS_PER_SECOND)
        status.duration_until_reset.seconds = seconds
        status.duration_until_reset.nanos = nanos


def tell(limit: Limit, rule: str, into: RateLimit) -> None:
    """A limit as Envoy knows it: so many per unit, or per so many units.

    A window that is not in whole seconds has no unit there.
    """
    into.requests_per_unit = limit.limit
    into.name = rule
    for unit, unit_ns in _UNITS:
        times, rest = divmod(limit.window_ns, unit_ns)
        if times and not rest:
            into.unit = unit
            if times > 1:
                into.unit_multiplier.value = times
            return
