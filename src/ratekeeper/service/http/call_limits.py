"""POST /v1/limit: limits that are given with the call.

    {"name": "emails", "key": "user:42", "limits": "10/minute", "cost": 1}

A caller without a rule document can use the service with this one request. It gives the limits, a
name for them (`name`) and the key that is counted (`key`). Counts belong to the name and the key,
as those of `Limiter("10/minute", name="emails").check("user:42")`: the next call may give other
numbers, and units that were spent stay spent.

**Apart from rules.** No rule applies to such a call. In counts, replies and records its limits are
named `limit:emails`, and no rule may have an ID that begins so. So a caller cannot mix its calls
into the records of a rule or of a list, whatever name it gives. Metrics count these calls without
their names, which are as many as the callers like. The subject begins with a part that no rule's
subject has. A token with a scope counts under its scope, so that two customers cannot spend each
other's units.

**The right to call it** is not part of the role `check`: a caller that chooses its own limits could
choose very high ones. The role `limit` has it.

Limits are parsed once for each token, name and text, and kept.

**A name has few limits.** The counts of one name and key are in one place of the store, which has
room for about a hundred limits that differ in algorithm, window or their own name. A token may use
LIMITS_OF_NAME_MAX of them under one name, and gets an error for more: most likely the caller writes
into the limits what belongs into the name or the key. The numbers may differ as often as the caller
likes. Other tokens are not affected. The bound is of one worker and its memory: the store has the
bound that no caller can pass.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import NAME_LENGTH_MAX, Limits, Request
from ratekeeper.core.subjects import KEY_LENGTH_MAX, PARTS_MAX, subject_of
from ratekeeper.decide.algorithms.in_flight import has_slots
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.rules.document.model import CALL_LIMIT
from ratekeeper.rules.document.reading import DocumentError, from_data
from ratekeeper.service.http.bodies import body_reader, problem_at
from ratekeeper.service.http.checks import Units, check_reply
from ratekeeper.service.http.context import (
    Handler,
    Routes,
    ServiceContext,
    ServiceReply,
    ServiceRequest,
    ServiceRoute,
)
from ratekeeper.service.http.tokens import Token

# Limiters that are kept, each a few kilobytes; when there are more, all are dropped. Their counts
# are in the store.
LIMITERS_MAX: Final = 1_024
# Limits of one token and name that differ in algorithm, window or their own name.
LIMITS_OF_NAME_MAX: Final = 32
# The first part of a subject without a scope. The parts of a rule's subject have a colon.
SUBJECT: Final = "(limit)"

# The recorder takes the subject from the result.
_NO_REQUEST: Final = Request()
_NAME_MAX: Final = NAME_LENGTH_MAX - len(CALL_LIMIT)
_KeyPart = Annotated[str, Meta(min_length=1, max_length=KEY_LENGTH_MAX)]


class LimitBody(msgspec.Struct, forbid_unknown_fields=True):
    """A key, and the limits that it is checked by."""

    name: Annotated[
        str, Meta(min_length=1, max_length=_NAME_MAX, description="The name of the limits.")
    ]
    key: Annotated[
        _KeyPart | Annotated[list[_KeyPart], Meta(min_length=1, max_length=PARTS_MAX // 2)],
        Meta(description="The key that is counted, or its parts."),
    ]
    limits: Annotated[
        msgspec.Raw,
        Meta(
            description="One or several limits, as in a rule document.",
            extra_json_schema={"x-rules": "limits"},
        ),
    ]
    cost: Annotated[Units, Meta(description="Units that the call spends.")] = 1


def routes(context: ServiceContext) -> Routes:
    """Return the route of limits that are given with the call."""
    route = ServiceRoute(_limit(context), "limit")
    return {"/v1/limit": {"POST": route}}


def _limit(context: ServiceContext) -> Handler:
    read = body_reader(LimitBody)
    limiters = _CallLimiters(context)

    async def limit(http_request: ServiceRequest) -> ServiceReply:
        body = read(http_request.body)
        key = _key_of(http_request.token, body.key)
        limiter = limiters.of(http_request.token, body.name, bytes(body.limits))
        started_ns = perf_counter_ns()
        result = await limiter.evaluate(key, body.cost)
        context.counters.decision_seconds.note(perf_counter_ns() - started_ns)
        context.counters.note_check(result)
        result = result._replace(counted=((subject_of(key), body.cost),))
        decided_ns = context.now_ns()
        if context.recorder is not None:
            context.recorder.note(
                _NO_REQUEST, result, body.cost, decided_ns, http_request.request_id
            )
        return check_reply(result, decided_ns, context.settings.style)

    return limit


def _key_of(token: Token, key: str | list[str]) -> tuple[str, ...]:
    """Return the key that is counted: apart from rules, and apart from other scopes."""
    scope = [f"{name}:{value}" for name, value in sorted(token.scope.items())]
    # With the number of the parts that follow, no part of a caller's key is taken for a scope.
    first = f"(limit {len(scope)})" if scope else SUBJECT
    return (first, *scope, *([key] if isinstance(key, str) else key))


class _CallLimiters:
    """The limiters of names and limits that were given with calls."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._limiters: dict[tuple[str, str, bytes], AsyncLimiter] = {}
        # The identities of the limits that a token has used under a name.
        self._used: dict[tuple[str, str], set[str]] = {}

    def of(self, token: Token, name: str, limits: bytes) -> AsyncLimiter:
        """Return the limiter of a name and limits in JSON. Raises ConfigError."""
        limiter = self._limiters.get((token.name, name, limits))
        if limiter is not None:
            return limiter
        settings = self._context.settings
        parsed = limits_of_data(msgspec.json.decode(limits))
        if has_slots(parsed):
            raise ConfigError(
                "the body: limits of requests in flight need the request's end, so they belong "
                "into a rule: see POST /v1/check and POST /v1/release"
            )
        if len(self._limiters) >= LIMITERS_MAX:
            self._limiters.clear()
            self._used.clear()
        used = self._used.get((token.name, name), set()) | {limit.identity for limit in parsed}
        if len(used) > LIMITS_OF_NAME_MAX:
            raise ConfigError(
                f"the body: name={show(name)} has {LIMITS_OF_NAME_MAX} limits of different "
                f"algorithms, windows or names already; give these limits another name"
            )
        limiter = AsyncLimiter(
            parsed,
            store=self._context.limiter.store,
            name=f"{CALL_LIMIT}{name}",
            on_failure=settings.on_failure,
            local_fallback=settings.local_fallback,
        )
        limiter.count_errors_in(self._context.counters.store_errors)
        self._used[token.name, name] = used
        self._limiters[token.name, name, limits] = limiter
        return limiter


def limits_of_data(data: Any) -> Limits:
    """Return limits that are given as in a rule document. Raises ConfigError.

    >>> limits_of_data(["10/second", {"limit": 5, "per": "1m", "algorithm": "fixed_window"}])
    (Limit(10, per=1), Limit(5, per=60, algorithm='fixed_window'))
    """
    path = "tiers.limits"
    try:
        return from_data({"version": 1, "tiers": {"limits": data}}).tiers["limits"].limits
    except DocumentError as error:
        problems = (
            problem_at("the body", each.where.replace(path, "limits", 1), each.message)
            for each in error.problems
        )
        raise ConfigError("; ".join(problems)) from None
