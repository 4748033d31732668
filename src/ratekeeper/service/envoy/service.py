"""Envoy's RateLimitService: from the bytes of a call to its reply.

**Failures.** A rule's `on_failure` decides, and not Envoy's `failure_mode_deny`: with `open` and
`local` the reply is OK or OVER_LIMIT, marked as degraded, and with `closed` OVER_LIMIT. Only with
`on_failure="raise"` does Envoy decide: the call fails as UNAVAILABLE. A message that no correctly
configured Envoy sends fails as INVALID_ARGUMENT.

**Leaky buckets.** An allowed request may have a delay. The service holds the reply for that time if
Envoy's `timeout` permits it; otherwise the request is over the limit and costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from ratekeeper.core.clock import NS_PER_SECOND, Clock, SystemClock, seconds_from_ns
from ratekeeper.core.errors import CapacityError, ConfigError, InvalidCost, InvalidKey, StoreError
from ratekeeper.core.model import CheckResult, decision_with
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.metrics.counters import Counters
from ratekeeper.service.envoy.decisions import Decider, was_charged
from ratekeeper.service.envoy.descriptors import DescriptorCheck, checks_of
from ratekeeper.service.envoy.protocol.messages import RateLimitRequest
from ratekeeper.service.envoy.replies import Outcome, reply_of
from ratekeeper.service.grpc.calls import CallError, GrpcCall, Status
from ratekeeper.service.http.tokens import Token, TokenRejection, Tokens, confined
from ratekeeper.web.answers import Style

if TYPE_CHECKING:
    from ratekeeper.history.recorder import Recorder

# Requests repeat: decoded messages are kept by their bytes, and all dropped when there are more.
# About 2 kB each.
REMEMBERED_MAX: Final = 4_096
REMEMBERED_BYTES_MAX: Final = 512
# The part of Envoy's timeout that is reserved for the reply.
WAY_BACK_SECONDS: Final = 0.01
# The longest delay of a call without a deadline.
HOLD_SECONDS_MAX: Final = 30.0
# A client that chooses its costs must not fill the log.

log = logging.getLogger("ratekeeper.envoy")


class RateLimitService:
    """Implements ShouldRateLimit with a limiter that has rules."""

    def __init__(
        self,
        limiter: AsyncLimiter,
        *,
        tokens: Tokens | None = None,
        style: Style | None = None,
        on_failure: FailurePolicy = "open",
        clock: Clock | None = None,
        counters: Counters | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Decide calls by `limiter`.

        `tokens`      the tokens of callers; None: every caller is accepted.
        `style`       which rate limit headers are sent.
        `on_failure`  the failure policy of descriptor limits; rules have their own.
        `clock`       the Unix time for headers, and the sleep for delays.
        `counters`    the counters of calls and their durations.
        `recorder`    records decisions and usage.
        """
        self._decider = Decider(limiter, on_failure)
        self._tokens = tokens
        self._style = style or Style()
        self._clock = clock or SystemClock()
        self._counters = counters or Counters()
        self._recorder = recorder
        self._remembered: dict[bytes, list[DescriptorCheck]] = {}
        self._over = SeldomLog(
            log, logging.WARNING, now_s=lambda: self._clock.now_ns() / NS_PER_SECOND
        )

    async def should_rate_limit(self, body: bytes, call: GrpcCall) -> bytes:
        """Handle one call; `body` is a RateLimitRequest, and the reply a RateLimitResponse."""
        try:
            # The token first: without one, the message is neither decoded nor remembered.
            token = None if self._tokens is None else permitted(self._tokens, call)
            checks = self._remembered.get(body) or self._read(body)
            if token is not None and token.scope:
                checks = _confined(token, checks)
            outcomes = await self._decided(checks, call)
            self._count(Status.OK)
            if self._recorder is not None:
                _record(self._recorder, checks, outcomes, call.metadata("x-request-id") or "")
            return reply_of(outcomes, self._clock.now_ns(), self._style)
        except CallError as error:
            raise self._counted(error) from None
        except DecodeError:
            refusal = CallError(Status.INVALID_ARGUMENT, "this is not a RateLimitRequest")
            raise self._counted(refusal) from None
        except ConfigError as error:
            raise self._counted(CallError(Status.INVALID_ARGUMENT, str(error))) from None
        except StoreError as error:
            raise self._counted(CallError(Status.UNAVAILABLE, str(error))) from None

    def _counted(self, error: CallError) -> CallError:
        self._count(error.status)
        return error

    def _count(self, status: Status) -> None:
        counted = self._counters.grpc_requests
        code = status.name
        counted[code] = counted.get(code, 0) + 1

    def _count_own(self, checks: Sequence[DescriptorCheck], results: Sequence[CheckResult]) -> None:
        """Count the checks of descriptors with limits of their own; the limiter counts others."""
        for check, result in zip(checks, results, strict=True):
            if check.override is not None and check.spends:
                self._counters.note_check(result)

    def _read(self, body: bytes) -> list[DescriptorCheck]:
        checks = checks_of(RateLimitRequest.FromString(body))
        if len(body) <= REMEMBERED_BYTES_MAX:
            if len(self._remembered) >= REMEMBERED_MAX:
                self._remembered.clear()
            self._remembered[body] = checks
        return checks

    async def _decided(self, checks: list[DescriptorCheck], call: GrpcCall) -> Sequence[Outcome]:
        began_ns = perf_counter_ns()
        try:
            results = await self._decider.decide(checks)
            self._counters.decision_seconds.note(perf_counter_ns() - began_ns)
            self._count_own(checks, results)
        except (CapacityError, InvalidCost, InvalidKey) as error:
            self._over.note("over the limit, and waiting does not help: %s", error)
            return [await self._looked(each) for each in checks]
        delay_ns = max(result.decision.delay_ns for result in results)
        if delay_ns and all(result.decision.allowed for result in results):
            return await self._held(checks, results, delay_ns, call)
        return results

    async def _looked(self, check: DescriptorCheck) -> Outcome:
        try:
            return await self._decider.look(check)
        except (CapacityError, InvalidCost, InvalidKey) as error:
            return error

    async def _held(
        self,
        checks: list[DescriptorCheck],
        results: list[CheckResult],
        delay_ns: int,
        call: GrpcCall,
    ) -> list[CheckResult]:
        """Wait for the delay and return the results; deny them if the deadline is earlier."""
        charged = [
            (each, result.decision)
            for each, result in zip(checks, results, strict=True)
            if each.spends and was_charged(result)
        ]
        left_s = call.time_remaining()
        delay_s = seconds_from_ns(delay_ns)
        if delay_s <= (HOLD_SECONDS_MAX if left_s is None else left_s - WAY_BACK_SECONDS):
            try:
                await self._clock.sleep_async(delay_s)
            except BaseException:
                await self._decider.give_back(charged)
                raise
            return results
        await self._decider.give_back(charged)
        return [_too_late(result) if result.decision.delay_ns else result for result in results]


def permitted(tokens: Tokens, call: GrpcCall) -> Token:
    """Return the caller's token. Raises CallError."""
    token = tokens.permitted(call.metadata("authorization"), "check")
    if isinstance(token, TokenRejection):
        raise refusal_of(token)
    return token


def _confined(token: Token, checks: Sequence[DescriptorCheck]) -> list[DescriptorCheck]:
    """Return the checks, confined to the token's scope. Raises CallError."""
    within = []
    for each in checks:
        request = confined(token, each.request)
        if isinstance(request, TokenRejection):
            raise refusal_of(request)
        within.append(each._replace(request=request, scope=token.scope))
    return within


def refusal_of(refused: TokenRejection) -> CallError:
    """Return the error for a caller whose token is missing, wrong, or of another scope."""
    unknown = refused.status == 401
    return CallError(
        Status.UNAUTHENTICATED if unknown else Status.PERMISSION_DENIED, refused.detail
    )


def _record(
    recorder: Recorder,
    checks: Sequence[DescriptorCheck],
    outcomes: Sequence[Outcome],
    request_id: str,
) -> None:
    """Record the checks that spend, unless one of them could not be decided."""
    results = [each for each in outcomes if isinstance(each, CheckResult)]
    if len(results) == len(checks):
        pairs = [
            (each, result) for each, result in zip(checks, results, strict=True) if each.spends
        ]
        recorder.note_all(
            [(each.request, each.requests) for each, _ in pairs],
            [result for _, result in pairs],
            time.time_ns(),
            request_id,
        )


def _too_late(result: CheckResult) -> CheckResult:
    decision = result.decision
    return result._replace(
        decision=decision_with(
            decision, allowed=False, retry_after_ns=decision.delay_ns, delay_ns=0
        )
    )
