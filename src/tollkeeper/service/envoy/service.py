"""Envoy's RateLimitService: from the bytes of a call to those of its answer.

**Who answers when something fails.** A rule's `on_failure` does, and not Envoy's
`failure_mode_deny`: with `open` and `local` the answer is OK or OVER_LIMIT, marked as degraded, and
with `closed` OVER_LIMIT. Only `on_failure="raise"` leaves it to Envoy: then the call fails as
UNAVAILABLE. What no Envoy that is configured well would send fails as INVALID_ARGUMENT.

**Leaky buckets.** An admitted request may have to wait for its turn. The answer is held for so
long, if Envoy's `timeout` leaves the time; if not, it is over the limit and costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from tollkeeper.core.clock import NS_PER_SECOND, Clock, SystemClock, seconds_from_ns
from tollkeeper.core.errors import CapacityError, ConfigError, InvalidKey, StoreError
from tollkeeper.core.model import CheckResult, decision_with
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.metrics.counters import Counters
from tollkeeper.service.envoy.deciding import Decider, was_charged
from tollkeeper.service.envoy.mapping import Asked, asked_of
from tollkeeper.service.envoy.protocol.messages import RateLimitRequest, RateLimitResponse
from tollkeeper.service.envoy.replies import Outcome, response_of
from tollkeeper.service.http.tokens import Token, TokenRejection, Tokens, confined
from tollkeeper.web.answers import Style

if TYPE_CHECKING:
    from tollkeeper.history.recorder import Recorder

try:
    import grpc
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise ConfigError(
        f"Envoy asks over gRPC, which needs grpcio: pip install 'tollkeeper[server]' ({error})"
    ) from error

# Requests resemble one another: what was asked is remembered by its bytes, and forgotten all at
# once when full. About 2 kB each.
REMEMBERED_MAX: Final = 4_096
REMEMBERED_BYTES_MAX: Final = 512
# Of the time that Envoy gives, so much is left for the way back.
WAY_BACK_SECONDS: Final = 0.01
# Without a deadline, a call is not held for longer.
HOLD_SECONDS_MAX: Final = 30.0
# A client that can choose what it costs must not fill the log.
LOG_EVERY_NS: Final = NS_PER_SECOND

log = logging.getLogger("tollkeeper.envoy")


class Call(Protocol):
    """What is needed of a call's context: grpc.aio's has it."""

    def invocation_metadata(self) -> Any: ...

    def time_remaining(self) -> float | None: ...

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


class RateLimitService:
    """Answers ShouldRateLimit by a limiter with rules."""

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
        """Answer by `limiter`.

        `tokens`      who may ask; None: everyone.
        `style`       which headers tell of limits.
        `on_failure`  for the limits that descriptors bring along; rules have their own.
        `clock`       the Unix time, for headers, and for waiting.
        `counters`    where calls and their times are counted.
        `recorder`    what keeps decisions and usage.
        """
        self._decider = Decider(limiter, on_failure)
        self._tokens = tokens
        self._style = style or Style()
        self._clock = clock or SystemClock()
        self._counters = counters or Counters()
        self._recorder = recorder
        self._remembered: dict[bytes, list[Asked]] = {}
        self._log_at_ns = 0

    async def should_rate_limit(self, body: bytes, call: Call) -> RateLimitResponse:
        """One call."""
        try:
            # The token first: who has none does not get us to read, nor to remember.
            token = None if self._tokens is None else await self._permitted(self._tokens, call)
            asked = self._remembered.get(body) or self._read(body)
            if token is not None and token.scope:
                asked = await self._confined(token, asked, call)
            outcomes = await self._decided(asked, call)
            self._count("OK")
            if self._recorder is not None:
                _record(self._recorder, asked, outcomes)
            return response_of(outcomes, self._clock.now_ns(), self._style)
        except DecodeError:
            code, said = grpc.StatusCode.INVALID_ARGUMENT, "this is not a RateLimitRequest"
        except ConfigError as error:
            code, said = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except StoreError as error:
            code, said = grpc.StatusCode.UNAVAILABLE, str(error)
        self._count(code.name)
        return await call.abort(code, said)

    async def _permitted(self, tokens: Tokens, call: Call) -> Token:
        """Who asks, if he may; else the call is over."""
        token = tokens.permitted(_authorization(call), "check")
        if isinstance(token, TokenRejection):
            await self._refuse(call, token)
        return token

    async def _confined(self, token: Token, asked: list[Asked], call: Call) -> list[Asked]:
        """What is asked, if the caller's token reaches so far; else the call is over."""
        within = []
        for each in asked:
            request = confined(token, each.request)
            if isinstance(request, TokenRejection):
                await self._refuse(call, request)
            within.append(each._replace(request=request, scope=token.scope))
        return within

    async def _refuse(self, call: Call, refused: TokenRejection) -> NoReturn:
        unknown = refused.status == 401
        code = grpc.StatusCode.UNAUTHENTICATED if unknown else grpc.StatusCode.PERMISSION_DENIED
        self._count(code.name)
        await call.abort(code, refused.detail)

    def _count(self, code: str) -> None:
        counted = self._counters.grpc_requests
        counted[code] = counted.get(code, 0) + 1

    def _read(self, body: bytes) -> list[Asked]:
        asked = asked_of(RateLimitRequest.FromString(body))
        if len(body) <= REMEMBERED_BYTES_MAX:
            if len(self._remembered) >= REMEMBERED_MAX:
                self._remembered.clear()
            self._remembered[body] = asked
        return asked

    async def _decided(self, asked: list[Asked], call: Call) -> Sequence[Outcome]:
        began_ns = perf_counter_ns()
        try:
            rulings = await self._decider.decide(asked)
            self._counters.decision_seconds.note(perf_counter_ns() - began_ns)
        except (CapacityError, InvalidKey) as error:
            self._log_seldom(error)
            return [await self._looked(each) for each in asked]
        delay_ns = max(ruling.decision.delay_ns for ruling in rulings)
        if delay_ns and all(ruling.decision.allowed for ruling in rulings):
            return await self._held(asked, rulings, delay_ns, call)
        return rulings

    async def _looked(self, asked: Asked) -> Outcome:
        try:
            return await self._decider.look(asked)
        except (CapacityError, InvalidKey) as error:
            return error

    async def _held(
        self, asked: list[Asked], rulings: list[CheckResult], delay_ns: int, call: Call
    ) -> list[CheckResult]:
        """The rulings, when it is their turn; denied, if that is too late for whoever asks."""
        charged = [
            each
            for each, ruling in zip(asked, rulings, strict=True)
            if each.spends and was_charged(ruling)
        ]
        left_s = call.time_remaining()
        delay_s = seconds_from_ns(delay_ns)
        if delay_s <= (HOLD_SECONDS_MAX if left_s is None else left_s - WAY_BACK_SECONDS):
            try:
                await self._clock.sleep_async(delay_s)
            except BaseException:
                await self._decider.give_back(charged)
                raise
            return rulings
        await self._decider.give_back(charged)
        return [_too_late(ruling) if ruling.decision.delay_ns else ruling for ruling in rulings]

    def _log_seldom(self, error: Exception) -> None:
        now_ns = self._clock.now_ns()
        if now_ns >= self._log_at_ns:
            self._log_at_ns = now_ns + LOG_EVERY_NS
            log.warning("over the limit, and no wait would help: %s", error)


def _record(recorder: Recorder, asked: Sequence[Asked], outcomes: Sequence[Outcome]) -> None:
    """Keep what was decided on those that spend; of one that can never pass, nothing was."""
    rulings = [each for each in outcomes if isinstance(each, CheckResult)]
    if len(rulings) == len(asked):
        pairs = [(each, ruling) for each, ruling in zip(asked, rulings, strict=True) if each.spends]
        recorder.note_all(
            [(each.request, each.units) for each, _ in pairs],
            [ruling for _, ruling in pairs],
            time.time_ns(),
        )


def _too_late(ruling: CheckResult) -> CheckResult:
    decision = ruling.decision
    return ruling._replace(
        decision=decision_with(
            decision, allowed=False, retry_after_ns=decision.delay_ns, delay_ns=0
        )
    )


def _authorization(call: Call) -> str | None:
    for key, value in call.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None
