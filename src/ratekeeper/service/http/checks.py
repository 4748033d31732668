"""POST /v1/check, POST /v1/check/batch, POST /v1/settle and POST /v1/release.

A check delays a request of the client, so everything that can be looked up is looked up when the
handlers are made, and nothing is awaited but a remote store.

**Bodies** are read strictly (`bodies.py`). An unknown field, a number where text belongs and a name
given twice are rejected, with the place of the error. If a misspelt field were dropped silently, a
limit would silently not apply. The structs below are also the source of the OpenAPI schemas.

**Returned units.** The service keeps no list of reservations, so it believes a caller that says it
was charged 100 units and used 37. A caller whose token has no scope could skip the check anyway. A
token with a scope may be in the hands of a customer, who may return only the customer's own units:
they are returned under the rules that count requests of this scope alone. Under any other rule,
such as a limit on the whole service, the units stay spent until they are refilled. Then too few
requests pass for a moment, and never too many.

A settlement may come long after the check, when time has already returned some of the units. So the
reply to a check with `settle` has `charged`: the rules, subjects, units and times of its charges,
and a random name. The caller sends it back. Then the service knows what was reserved, returns only
units that time has not returned, rejects a settlement for another client, and applies it once.
Without `charged`, a settlement is a correction, as in `Limiter.refund` without a decision.
"""

from __future__ import annotations

import asyncio
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import repeat
from os import urandom
from time import perf_counter_ns
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.costs import Cost, check_settlement, requests_in
from ratekeeper.core.errors import (
    CapacityError,
    ConfigError,
    RatekeeperError,
    StoreError,
    show,
)
from ratekeeper.core.model import (
    REQUEST_FIELDS,
    UNITS_MAX,
    CheckResult,
    Limit,
    PenaltyKind,
    Request,
    ResultKind,
    Settlement,
)
from ratekeeper.decide.algorithms.in_flight import STAMP_MAX
from ratekeeper.decide.store import stamp_of
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.limiter.charges import Owed, RuleCharge, charges_in, settlement_of, slots_in
from ratekeeper.rules.compiled import RuleCheck
from ratekeeper.rules.document.model import Rule
from ratekeeper.service.http.bodies import body_reader
from ratekeeper.service.http.context import (
    JSON,
    NO_STORE,
    PROBLEM,
    Handler,
    Routes,
    ServiceContext,
    ServiceReply,
    ServiceRequest,
    ServiceRoute,
    encode,
    error_reply,
    in_scope,
    json_reply,
)
from ratekeeper.web.addresses import counted_address
from ratekeeper.web.answers import Style, error_answer, problem_of, raw_headers_of, status_of

ATTRIBUTES_MAX: Final = 64
BATCH_CHECKS_MAX: Final = 100
# Bodies that are remembered after they were decoded: at most 4 MB, with their check plans.
REMEMBERED_MAX: Final = 2_048
REMEMBERED_BYTES_MAX: Final = 512
# Requests without attributes share this dict; no code writes to it.
_NO_ATTRIBUTES: Final[dict[str, str]] = {}
# A value that matches only itself when it is used as a pattern.
_PLAIN: Final = re.compile(r"[\w.@-]+")
# Below it, a division gives the same seconds as `seconds_from_ns`, in a tenth of the time.
_EXACT_NS: Final = 2**50
# Three times as fast as calling the class, which does the same in Python.
_new_tuple: Final = tuple.__new__

RESERVATION_LENGTH_MAX: Final = 128
CHARGED_LENGTH_MAX: Final = 16_384
UNIT_NAMES_MAX: Final = 64
# Numbers that every JSON parser reads exactly.
Slot = Annotated[int, Meta(ge=0, le=STAMP_MAX)]
Units = Annotated[int, Meta(ge=0, le=UNITS_MAX)]
UnitCosts = Annotated[
    dict[str, Units],
    Meta(
        max_length=UNIT_NAMES_MAX,
        description="Costs by unit, for rules that have a `unit`.",
        examples=[{"requests": 1, "tokens": 1200}],
    ),
]
Attributes = Annotated[
    dict[str, str],
    Meta(
        max_length=ATTRIBUTES_MAX,
        description="Other properties that rules match or count by.",
        examples=[{"region": "eu"}],
    ),
]


# ── Bodies ─────────────────────────────────────────────────────────────────────────────────────


class RequestFields(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The fields of a request, as members of a body."""

    user: str | None = None
    api_key: str | None = None
    ip: str | None = None
    tenant: str | None = None
    tier: str | None = None
    endpoint: str | None = None
    method: str | None = None
    attributes: Attributes = msgspec.field(default_factory=dict)


class CheckBody(RequestFields, forbid_unknown_fields=True, gc=False):
    """The request to check, and its cost."""

    cost: Annotated[Units, Meta(description="Units that the request spends.")] = 1
    costs: Annotated[
        UnitCosts | None, Meta(description="Units that it spends, by unit; instead of `cost`.")
    ] = None
    settle: Annotated[
        bool, Meta(description="True if the cost will be settled: the reply has `charged`.")
    ] = False
    slot: Annotated[
        Slot,
        Meta(
            description="Under a limit of requests in flight: a random number that names the slot "
            "of this request, so that the check can be repeated if its reply is lost. By default "
            "the service chooses one."
        ),
    ] = 0


class ReleaseBody(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """A request that was checked, and the number of its slot."""

    slot: Annotated[Slot, Meta(description="As in the reply to the check.")]
    renew: Annotated[
        bool,
        Meta(
            description="True: the request goes on, and its slot lasts as long again as at first."
        ),
    ] = False


class ReleaseReply(msgspec.Struct):
    """The slot is free, or it was renewed."""

    in_flight: Annotated[bool, Meta(description="True if the slot was renewed.")]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """Several checks."""

    checks: Annotated[list[CheckBody], Meta(min_length=1, max_length=BATCH_CHECKS_MAX)]
    atomic: Annotated[
        bool, Meta(description="True: either every check passes, or none is charged.")
    ] = False


class SettleBody(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """A request that was checked, the units that it spent, and its real cost."""

    actual: Annotated[
        Units | UnitCosts,
        Meta(
            description="Units that the request cost in the end, or costs by unit; a unit that is "
            "not named stays as it was reserved, and 0 returns all."
        ),
    ]
    reserved: Annotated[
        Units | UnitCosts | None,
        Meta(description="Units that the check spent; `charged` says it, too."),
    ] = None
    reservation: Annotated[
        str,
        Meta(
            max_length=RESERVATION_LENGTH_MAX,
            description="A name of the reservation, such as the ID of the request; by default "
            "that of `charged`. A second settlement of the same client with it changes nothing: "
            "the last 1,023 names of a client are remembered, until an hour after its last "
            "settlement.",
        ),
    ] = ""
    charged: Annotated[
        str,
        Meta(
            max_length=CHARGED_LENGTH_MAX,
            description="As the check's reply had it: what was charged, to whom, and when. Units "
            "that time has returned already are not returned again.",
        ),
    ] = ""


class CheckReply(msgspec.Struct, gc=False):
    """The decision about a request. A number is null if there is no limit or it is unknown."""

    allowed: bool
    kind: Annotated[ResultKind, Meta(description="Whether limits decided, or why they did not.")]
    rule: Annotated[str, Meta(description="The ID of the rule with the tightest limit.")]
    limit: Annotated[
        int | None,
        Meta(
            description="The most that can remain: the capacity, and granted units. "
            "Null if no limit applies."
        ),
    ]
    remaining: Annotated[int | None, Meta(description="How many single requests would pass now.")]
    retry_after: Annotated[
        float | None, Meta(description="Seconds until the same cost would pass.")
    ]
    reset_after: Annotated[
        float | None, Meta(description="Seconds until the quota is whole again.")
    ]
    delay: Annotated[float, Meta(description="Leaky bucket: seconds to hold the request.")]
    degraded: Annotated[
        bool, Meta(description="True if the store failed and the failure policy decided.")
    ]
    shadow_denied: Annotated[
        tuple[str, ...], Meta(description="Rules in shadow mode that would have denied it.")
    ]
    penalty: Annotated[
        PenaltyKind | msgspec.UnsetType,
        Meta(description="The penalty that denied the request; absent if a limit decided."),
    ] = msgspec.UNSET
    charged: Annotated[
        str | msgspec.UnsetType,
        Meta(description="The charges and their times, for the settlement; if `settle` is true."),
    ] = msgspec.UNSET
    slot: Annotated[
        int | msgspec.UnsetType,
        Meta(
            description="The number of the request's slot, if a limit counts requests in flight: "
            "release it when the request ends."
        ),
    ] = msgspec.UNSET


class BatchDecision(CheckReply, kw_only=True):
    """The decision about one check of a batch, and the status that the check alone would get."""

    status: int


class BatchError(msgspec.Struct):
    """One check of a batch that could not be decided."""

    status: Annotated[int, Meta(description="The status that the check alone would get.")]
    allowed: bool
    error: Annotated[dict[str, Any], Meta(description="The reason, as in problem JSON.")]


class BatchReply(msgspec.Struct):
    """The results of a batch, in the order of its checks."""

    # msgspec has no untagged unions of structs; the schema says which two there are.
    results: Annotated[
        list[Any],
        Meta(
            extra_json_schema={
                "items": {
                    "anyOf": [
                        {"$ref": "#/components/schemas/BatchDecision"},
                        {"$ref": "#/components/schemas/BatchError"},
                    ]
                }
            }
        ),
    ]


class SettleReply(msgspec.Struct):
    """The result of a settlement."""

    charged: Annotated[
        int | dict[str, int],
        Meta(
            description="Units that the request is charged in all, or by unit if `actual` is: the "
            "most that a refund of it returns."
        ),
    ]
    forgiven: Annotated[
        int,
        Meta(description="Units that were not charged, because a limit owes as much as it may."),
    ]
    uncounted: Annotated[
        int,
        Meta(description="Units whose charge the store has not confirmed; not charged again."),
    ]
    repeated: Annotated[
        bool,
        Meta(
            description="True if the reservation was settled before: nothing was changed, and the "
            "other numbers are 0."
        ),
    ]
    reason: Annotated[
        str, Meta(description="Why nothing was changed, or why units were not returned.")
    ] = ""


# A Request is filled slot by slot: its own constructor would repeat the checks of the decoder, and
# takes four times as long.
_SETTERS: Final = tuple(
    Request.__dict__[name].__set__ for name in (*REQUEST_FIELDS, "attributes", "digests")
)
_user, _api_key, _ip, _tenant, _tier, _endpoint, _method, _attributes, _digests = _SETTERS
_new_request: Final = Request.__new__


def request_of(fields: RequestFields) -> Request:
    """Return the request that a body describes."""
    request = _new_request(Request)
    _user(request, fields.user)
    _api_key(request, fields.api_key)
    ip = fields.ip
    _ip(request, ip if ip is None or ":" not in ip else counted_address(ip))
    _tenant(request, fields.tenant)
    _tier(request, fields.tier)
    _endpoint(request, fields.endpoint)
    _method(request, fields.method)
    _attributes(request, fields.attributes or _NO_ATTRIBUTES)
    _digests(request, None)
    return request


def cost_of(body: CheckBody) -> Cost:
    """Return the cost of a check. Raises ConfigError for two."""
    if body.costs is None:
        return body.cost
    if body.cost != 1:
        raise ConfigError("the body: cost and costs are both given; give one of them")
    return body.costs


# ── Handlers ───────────────────────────────────────────────────────────────────────────────────


def routes(context: ServiceContext) -> Routes:
    """Return the routes of checks."""
    return {
        "/v1/check": {"POST": ServiceRoute(_check(context), "check")},
        "/v1/check/batch": {"POST": ServiceRoute(_batch(context), "check")},
        "/v1/settle": {"POST": ServiceRoute(_settle(context), "check")},
        "/v1/release": {"POST": ServiceRoute(_release(context), "check")},
    }


class ReadCheck(NamedTuple):
    """The body of a check."""

    request: Request
    cost: Cost
    settles: bool
    """True if the caller will settle the cost, and needs the charges."""
    slot: int
    """The number that the caller has chosen for the request's slot; 0 if it has not."""


class RememberedChecks:
    """Requests by their bodies: a client that checks often sends the same bytes again.

    Decoding a body takes a microsecond, a tenth of a check; finding it here takes a tenth of that.
    A request never changes, so callers can share it.
    """

    def __init__(self) -> None:
        self.by_body: dict[bytes, ReadCheck] = {}
        self._decode = body_reader(CheckBody)

    def read(self, body: bytes) -> ReadCheck:
        """Decode a body into a request and its cost. Raises BodyRejected, ConfigError."""
        fields = self._decode(body)
        found = ReadCheck(request_of(fields), cost_of(fields), fields.settle, fields.slot)
        if len(body) <= REMEMBERED_BYTES_MAX:
            if len(self.by_body) >= REMEMBERED_MAX:
                self.by_body.clear()
            self.by_body[body] = found
        return found


def _check(context: ServiceContext) -> Handler:
    remembered = RememberedChecks()
    by_body = remembered.by_body
    limiter = context.limiter
    evaluate_at_once = limiter.evaluate_at_once if limiter.answers_at_once else None
    now_ns = context.now_ns
    style = context.settings.style
    note_seconds = context.counters.decision_seconds.note
    recorder = context.recorder

    async def check(http_request: ServiceRequest) -> ServiceReply:
        body = http_request[2]
        request, cost, settles, slot = by_body.get(body) or remembered.read(body)
        scope = http_request[3].scope
        if scope:
            request = in_scope(http_request.token, request)
        started_ns = perf_counter_ns()
        try:
            if slot:
                [result] = await limiter.evaluate_all([(request, cost)], [slot])
            elif evaluate_at_once is None:
                result = (
                    await limiter.evaluate(request, cost)
                    if isinstance(cost, int)
                    else await limiter.evaluate(request, costs=cost)
                )
            else:
                result = evaluate_at_once(request, cost)
        except CapacityError as error:
            return await _capacity_reply(context, request, error)
        note_seconds(perf_counter_ns() - started_ns)
        decided_ns = now_ns()
        if recorder is not None:
            recorder.note(request, result, requests_in(cost), decided_ns, http_request[4])
        decision, _, kind, shadow_denied, _, _ = result
        is_plain = kind == "limited" and decision.allowed and not decision.degraded
        source = decision.source
        has_slot = source.prepared.has_slots if type(source) is RuleCheck else type(source) is list
        if not is_plain or settles or has_slot:
            return check_reply(result, decided_ns, style, settles=settles)
        # The common reply, without the two calls that `check_reply` would take.
        headers = raw_headers_of(result, decided_ns, style)
        headers.append(JSON)
        reset_after_ns = decision.reset_after_ns
        reply = CheckReply(
            True,
            "limited",
            decision.rule,
            decision.limit,
            decision.remaining,
            0.0,
            reset_after_ns / NS_PER_SECOND if reset_after_ns < _EXACT_NS else decision.reset_after,
            decision.delay if decision.delay_ns else 0.0,
            False,
            shadow_denied,
        )
        return _new_tuple(ServiceReply, (200, headers, encode(reply)))

    return check


async def _capacity_reply(
    context: ServiceContext, request: Request, error: CapacityError
) -> ServiceReply:
    """Return the 422 to a cost that can never fit, with the state of the limits, if it is known."""
    reply = error_reply(error)
    assert reply is not None, "a CapacityError has a reply"  # noqa: S101 - our own bug
    with suppress(RatekeeperError):
        look = await context.limiter.evaluate(request, 0, spend=False)
        if look.decision.allowed:
            reply.headers[:0] = raw_headers_of(look, context.now_ns(), context.settings.style)
    return reply


def check_reply(
    result: CheckResult, now_ns: int, style: Style, *, settles: bool = False
) -> ServiceReply:
    """Return the reply to a check: the decision, or a problem that includes its members."""
    headers = raw_headers_of(result, now_ns, style)
    members = check_members(result, settles=settles)
    if result.decision.allowed:
        return ServiceReply(200, [*headers, JSON], encode(members))
    denied = {**problem_of(result, now_ns), **members}
    return ServiceReply(status_of(result), [*headers, PROBLEM, NO_STORE], encode(denied))


def check_members(result: CheckResult, *, settles: bool = False) -> dict[str, Any]:
    """Return the members of a CheckReply; with `settles`, also the charges."""
    decision, _, kind, shadow_denied, _, _ = result
    # Without a limit there are no numbers; without a store they are unknown.
    has_limit = kind in {"limited", "unavailable"}
    is_exact = kind == "limited" and not decision.degraded
    members = {
        "allowed": decision.allowed,
        "kind": kind,
        "rule": decision.rule if has_limit else "",
        "limit": decision.limit if has_limit else None,
        "remaining": decision.remaining if is_exact else None,
        "retry_after": None if kind == "blocked" else decision.retry_after,
        "reset_after": decision.reset_after if is_exact else None,
        "delay": decision.delay if is_exact else 0.0,
        "degraded": decision.degraded,
        "shadow_denied": shadow_denied,
    }
    if decision.penalty is not None:
        members["penalty"] = decision.penalty
    if settles and decision.allowed:
        members["charged"] = charged_text(result)
    for check in slots_in(decision):
        members["slot"] = stamp_of(check.counter)  # that of all rules
    return members


def _batch(context: ServiceContext) -> Handler:
    limiter = context.limiter
    read = body_reader(BatchBody)
    # Checks on a remote store run concurrently; in memory, a task for each would only cost time.
    is_remote = not limiter.store.is_local
    note_seconds = context.counters.decision_seconds.note

    async def batch(http_request: ServiceRequest) -> ServiceReply:
        body = read(http_request.body)
        settles = [each.settle for each in body.checks]
        slots = [each.slot for each in body.checks]
        ids = repeat(http_request.request_id)
        wanted = [
            (in_scope(http_request.token, request_of(each)), cost_of(each)) for each in body.checks
        ]
        if body.atomic:
            started_ns = perf_counter_ns()
            decided = await limiter.evaluate_all(wanted, slots)
            note_seconds(perf_counter_ns() - started_ns)
            if context.recorder is not None:
                recorded = [(request, requests_in(cost)) for request, cost in wanted]
                context.recorder.note_all(
                    recorded, decided, context.now_ns(), http_request.request_id
                )
            results: list[Any] = list(map(_batch_decision, decided, settles))
        elif is_remote:
            results = await asyncio.gather(*map(one, wanted, settles, slots, ids))
        else:
            results = [await each for each in map(one, wanted, settles, slots, ids)]
        return json_reply(BatchReply(results))

    async def one(
        check: tuple[Request, Cost], settles: bool, slot: int, request_id: bytes
    ) -> BatchDecision | BatchError:
        request, cost = check
        started_ns = perf_counter_ns()
        try:
            if slot:
                [result] = await limiter.evaluate_all([check], [slot])
            else:
                result = await (
                    limiter.evaluate(request, cost)
                    if isinstance(cost, int)
                    else limiter.evaluate(request, costs=cost)
                )
            note_seconds(perf_counter_ns() - started_ns)
            if context.recorder is not None:
                spent = requests_in(cost)
                context.recorder.note(request, result, spent, context.now_ns(), request_id)
            return _batch_decision(result, settles)
        except (CapacityError, ConfigError, StoreError) as error:
            return _batch_error(error)

    return batch


def _batch_decision(result: CheckResult, settles: bool) -> BatchDecision:
    return BatchDecision(**check_members(result, settles=settles), status=status_of(result))


def _batch_error(error: RatekeeperError) -> BatchError:
    answer = error_answer(error)
    assert answer is not None, "the caller names the errors"  # noqa: S101 - our own bug
    return BatchError(answer.status, False, msgspec.json.decode(answer.body)["error"])


def _settle(context: ServiceContext) -> Handler:
    read = body_reader(SettleBody)
    limiter = context.limiter

    async def settle(http_request: ServiceRequest) -> ServiceReply:
        body = read(http_request.body)
        token = http_request.token
        request = in_scope(token, request_of(body))
        found = _reserved(limiter, request, body)
        charged, actual = found.charged, body.actual
        if token.scope:
            charged = [each for each in charged if counts_only(token.scope, each[0].rule)]
        if name := body.reservation or found.name:
            # The name belongs to the caller's scope: one customer cannot take the names of another.
            of = tuple(f"{field}={value}" for field, value in sorted(token.scope.items()))
            owed = await limiter.settle_once(request, name, charged, found.checks, actual, of)
        else:
            owed = await limiter.settle_charges(charged, found.checks, actual)
        result = settlement_of(found.checks, owed, body.reserved, actual)
        if owed is None:
            return json_reply(_settle_reply(result, "this reservation was settled already"))
        _record_settled(context, found.checks, actual, owed, with_returns=not token.scope)
        late = _late(charged, actual, context.now_ns())
        reason = f"too late: time has returned the units of {', '.join(late)}" if late else ""
        return json_reply(_settle_reply(result, reason))

    return settle


def _release(context: ServiceContext) -> Handler:
    read = body_reader(ReleaseBody)

    async def release(http_request: ServiceRequest) -> ServiceReply:
        body = read(http_request.body)
        request = in_scope(http_request.token, request_of(body))
        if body.renew:
            await context.limiter.renew_stamp(request, body.slot)
        else:
            await context.limiter.release_stamp(request, body.slot)
        return json_reply(ReleaseReply(body.renew))

    return release


def _settle_reply(result: Settlement, reason: str) -> SettleReply:
    charged = result.charged
    return SettleReply(charged if isinstance(charged, int) else dict(charged), *result[1:], reason)


def _record_settled(
    context: ServiceContext,
    checks: Sequence[RuleCheck],
    actual: Cost,
    owed: Sequence[Owed],
    *,
    with_returns: bool,
) -> None:
    """Correct the recorded usage; a customer must not reduce its own bill (`with_returns`)."""
    recorder, now_ns = context.recorder, context.now_ns()
    if recorder is None:
        return
    for check, each in zip(checks, owed, strict=True):
        units = check.settled(actual) - check.units - sum(each)
        if check.rule.mode != "shadow" and (units > 0 or (units and with_returns)):
            recorder.settle(check.rule.id, check.subject, units, now_ns)


# ── What was reserved ──────────────────────────────────────────────────────────────────────────


class _Reserved(NamedTuple):
    """What a check has charged, as the caller of the settlement says it."""

    charged: list[RuleCharge]
    """The charges that may be returned."""
    checks: list[RuleCheck]
    """Every rule that applies, with the units that it was charged."""
    name: str
    """The name of the reservation; empty if it has none."""


def _reserved(limiter: AsyncLimiter, request: Request, body: SettleBody) -> _Reserved:
    """Return what the check of a settlement has charged. Raises ConfigError."""
    plan = limiter.compiled_rules.plan
    reserved = body.reserved
    if not body.charged:
        if reserved is None:
            raise ConfigError(
                "the body: say what was charged: copy `charged` from the reply to a check with "
                '"settle": true, or give `reserved`'
            )
        check_settlement(reserved, body.actual)
        plan(request, body.actual)  # rejects a unit that no rule counts
        checks = plan(request, reserved).checks
        return _Reserved([(check, None) for check in checks], checks, "")
    plan(request, body.actual)
    checks = plan(request, 0).checks
    name, charged = _charges_of(checks, body.charged)
    if reserved is not None:
        check_settlement(reserved, body.actual)
        expected = {check.rule.id: check.units for check in plan(request, reserved).checks}
        for check, _ in charged:
            if check.units != expected[check.rule.id]:
                raise ConfigError(
                    f"the body: reserved={show(reserved)} is {expected[check.rule.id]:,} units of "
                    f"rule {check.rule.id}, and `charged` says {check.units:,}; leave reserved out"
                )
    known = {check.rule.id: check for check, _ in charged}
    returnable = [each for each in charged if each[1] is not None]
    return _Reserved(returnable, [known.get(each.rule.id, each) for each in checks], name)


async def give_back(
    limiter: AsyncLimiter, scope: Mapping[str, str], request: Request, cost: Cost
) -> None:
    """Return units under the rules that a token's scope covers. Raises StoreError, ConfigError.

    `request` must be in the scope already.
    """
    checks = limiter.compiled_rules.plan(request, cost).checks
    covered = [(each, None) for each in checks if not scope or counts_only(scope, each.rule)]
    await limiter.settle_charges(covered, [], 0)


def charged_text(result: CheckResult) -> str:
    """Return what a check has charged, as a text for the settlement.

    Each rule has its own time, and a split rule the part that was charged. A rule that was charged
    nothing that can be returned, such as units of a grant, has no time. The text holds no secret
    and is not signed: the caller is believed about the reserved units anyway.
    """
    charges: list[_Charged] = []
    for check, charged_ns in charges_in(result.decision):
        part = [subject for _, subject in check.parts].index(check.counted)
        charges.append((check.rule.id, part, charged_ns, check.units, _digest(check.subject)))
    known = {charge[0] for charge in charges}
    for applied, (subject, units) in zip(result.applied, result.counted, strict=False):
        if applied.rule not in known:
            charges.append((applied.rule, 0, None, units, _digest(subject)))
    return urlsafe_b64encode(msgspec.msgpack.encode((urandom(_NAME_BYTES), charges))).decode()


def _digest(subject: str) -> bytes:
    return blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=_NAME_BYTES).digest()


_NAME_BYTES: Final = 8
_Bytes = Annotated[bytes, Meta(min_length=_NAME_BYTES, max_length=_NAME_BYTES)]
# Rule, part, time, units and subject. A time beyond the year 2096, or more units, are beyond the
# range of the stores.
_Charged = tuple[
    str,
    int,
    Annotated[int, Meta(ge=0, le=4 * 10**18)] | None,
    Annotated[int, Meta(ge=0, le=UNITS_MAX)],
    _Bytes,
]
_decode_charges: Final = msgspec.msgpack.Decoder(tuple[_Bytes, list[_Charged]]).decode


def _charges_of(checks: Sequence[RuleCheck], charged: str) -> tuple[str, list[RuleCharge]]:
    """Return the name of a reservation and the rules that it charged, and that still apply.

    Raises ConfigError for a text that is none, or that belongs to another client.
    """
    try:
        name, charges = _decode_charges(urlsafe_b64decode(charged.encode("ascii")))
    except (ValueError, msgspec.DecodeError):
        raise ConfigError(
            f"charged={show(charged)} is not a text of a reply to a check; "
            f"copy `charged` from the reply, or leave it out"
        ) from None
    by_rule = {check.rule.id: check for check in checks}
    found: list[RuleCharge] = []
    for rule, part, charged_ns, units, subject in charges:
        check = by_rule.pop(rule, None)
        if check is None or not 0 <= part < len(check.parts):
            continue
        if subject != _digest(check.subject):
            raise ConfigError(
                f"charged belongs to another client: rule {rule} has charged another subject; send "
                f"the fields of the request that was checked"
            )
        counter, counted = check.parts[part]
        at = check._replace(counter=counter, counted=counted, units=units)
        found.append((at, charged_ns))
    return name.hex(), found


def _late(charged: Iterable[RuleCharge], actual: Cost, now_ns: int) -> list[str]:
    """Return the rules whose surplus units time has returned already."""
    return [
        check.rule.id
        for check, charged_ns in charged
        if charged_ns is not None
        and check.settled(actual) < check.units
        and now_ns - charged_ns >= max(map(_whole_ns, check.counter.limits))
    ]


def _whole_ns(limit: Limit) -> int:
    """Return the time after which no unit of a charge counts any more."""
    windows = 2 if limit.algorithm == "sliding_window_counter" else 1
    return max(windows, -(-limit.capacity // limit.limit)) * limit.window_ns


def counts_only(scope: Mapping[str, str], rule: Rule) -> bool:
    """Return True if a rule counts requests of the scope separately from all others.

    >>> counts_only({"tenant": "acme"}, Rule("tenants", by=("tenant", "user")))
    True
    >>> counts_only({"tenant": "acme"}, Rule("service", by=()))
    False
    """
    return any(
        name in rule.by or (_patterns(rule, name) == (value,) and _PLAIN.fullmatch(value))
        for name, value in scope.items()
    )


def _patterns(rule: Rule, name: str) -> tuple[str, ...]:
    """Return the patterns of a rule for one field or attribute."""
    if name in REQUEST_FIELDS:
        found: tuple[str, ...] = getattr(rule.match, name)
        return found
    return rule.match.attributes.get(name, ())
