"""THE PATH: identify → match → decide, in one order for every limiter.

`Path` sequences the stages. `Limiter` (limiter.py) and `AsyncLimiter` (limiter_async.py) are its
two faces, with the same verbs: the one for threads, the other awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from os import PathLike
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Self, cast

from tollkeeper.core import switches
from tollkeeper.core.clock import Clock, clock_of, duration_ns
from tollkeeper.core.errors import ConfigError, StoreError, show
from tollkeeper.core.model import (
    DEFAULT_NAME,
    WINDOW_NS_MAX,
    AppliedRule,
    CheckResult,
    Decision,
    Limit,
    Request,
    check_name,
    units_of,
)
from tollkeeper.core.rates import LimitsArgument, limits_of
from tollkeeper.core.subjects import Key, check_by, subject_of, subject_of_request
from tollkeeper.decide.combine import combine_decisions
from tollkeeper.decide.failure import FailurePolicy, check_policy, decision_on_failure
from tollkeeper.decide.local_fallback import Asked, LocalFallback, LocalLimits, local_fallback_of
from tollkeeper.decide.store import Gate, Store, StoreStats
from tollkeeper.decide.stores import store_of
from tollkeeper.limiter.arguments import request_of
from tollkeeper.metrics.tally import RuleCounts, Tally
from tollkeeper.rules.compiled import CompiledRules
from tollkeeper.rules.document.reading import Rules, document_of
from tollkeeper.rules.penalties import Penalty
from tollkeeper.rules.ruled import RuledGate
from tollkeeper.rules.ruled_async import AsyncRuledGate

if TYPE_CHECKING:
    from tollkeeper.control.follow import Follower, LoadedRules, RulesStatus

Duration = float | timedelta

# To settle, so many attempts: halving the largest cost takes 30, and a limit that is refilled
# faster than it is asked has a little room for ever.
SETTLE_ATTEMPTS_MAX = 64
# A longer timeout is as good as none, and would not fit a clock.
_TIMEOUT_NS_MAX = 100 * WINDOW_NS_MAX


class Path:
    """What both limiters are: limits prepared on a store, and the order of the stages."""

    # Of a limiter from rules; None for one with limits of its own.
    _rules: RuledGate | AsyncRuledGate | None = None
    _follower: Follower | None = None

    def __init__(
        self,
        limits: LimitsArgument,
        *,
        store: str | Store = "memory://",
        clock: Clock | None = None,
        name: str = "",
        by: Sequence[str] | None = None,
        on_failure: FailurePolicy = "open",
        local_fallback: LocalFallback | None = None,
    ) -> None:
        """Prepare `limits` on a store.

        `limits`      a rate string, a Limit, or several of either; all must pass.
        `store`       a URI, or a store that another limiter uses too.
        `clock`       where time comes from; by default the system. A store that is handed in
                      decides by its own; this one is then for waiting.
        `name`        keeps limiters on one store apart, and names this one in its decisions.
        `by`          what a Request is counted by, for example ["tenant", "user"].
        `on_failure`  what to answer when the store cannot decide: open, closed, local or raise.
        `local_fallback`     how `local` limits then.
        """
        check_name("name", name)
        prepared = limits_of(limits)
        self._by = check_by(by) if by is not None else None
        self._name = name
        self._start(
            store, clock, on_failure, local_fallback, lambda: self._store.gate(prepared, name)
        )

    @classmethod
    def from_rules(
        cls,
        rules: Rules,
        *,
        store: str | Store = "memory://",
        clock: Clock | None = None,
        on_failure: FailurePolicy = "open",
        local_fallback: LocalFallback | None = None,
        follow: bool = True,
        poll: float = 1.0,
        snapshot: str | PathLike[str] | None = None,
    ) -> Self:
        """A limiter whose limits a rule document says; `check` takes a Request.

        `rules`       the path of a document, its text, a Document, or the URL of a database
                      ("sqlite:///rules.db", "postgresql://app@host/rules").
        `store`, `clock` and `on_failure` as of the constructor; a rule's own `on_failure` goes
        before.
        `local_fallback`  how `on_failure: local` limits while the store cannot be asked.
        `follow`      put every later version of a file or database into force as it appears.
        `poll`        ask for one every so many seconds, also where nothing hints at a change.
        `snapshot`    a file that keeps the last good rules, to start with while `rules` is away.

        Blocks until the rules are there; what follows them is a thread of its own. Raises
        ConfigError for a document that is wrong, with every place in it that is, and for a
        database that holds no rules yet; StoreUnavailable for one that cannot be reached.
        """
        # Imported here: limits alone do without what reads, follows and keeps documents.
        from tollkeeper.control.follow import (  # noqa: PLC0415 - see above
            Follower,
            FollowOptions,
            load,
            poll_s_of,
        )

        limiter = cls.__new__(cls)
        options = FollowOptions(poll_s_of(poll), None if snapshot is None else FilePath(snapshot))
        loaded = load(rules, options.snapshot)
        Path._start_with_rules(limiter, loaded, store, clock, on_failure, local_fallback)
        Path._follow(limiter, Follower(limiter, rules, loaded, options, limiter.store), follow)
        return limiter

    def _follow(self, follower: Follower, follow: bool) -> None:
        self._follower = follower
        if follow:
            follower.start()

    def _start_with_rules(
        self,
        loaded: LoadedRules,
        store: str | Store,
        clock: Clock | None,
        on_failure: FailurePolicy,
        local_fallback: LocalFallback | None,
    ) -> None:
        self._by = None
        self._name = ""
        self._start(store, clock, on_failure, local_fallback, lambda: self._ruled(loaded))

    def _ruled(self, loaded: LoadedRules) -> Gate:
        """Rules on the store, as a gate whose subject is a request."""
        self._rules = self._gate_for_rules()(
            self._store,
            loaded.document,
            self._clock,
            loaded.status.version,
            self._on_failure,
            self._local,
        )
        return cast("Gate", self._rules)

    def _gate_for_rules(self) -> type[RuledGate | AsyncRuledGate]:
        return RuledGate

    def _start(
        self,
        store: str | Store,
        clock: Clock | None,
        on_failure: FailurePolicy,
        local_fallback: LocalFallback | None,
        prepare: Callable[[], Gate],
    ) -> None:
        check_policy(on_failure)
        self._on_failure = on_failure
        self._clock = clock_of(clock)
        self._local = LocalLimits(local_fallback_of(local_fallback), self._clock)
        self._owns_store = isinstance(store, str)
        self._store = store_of(store, self._clock)
        try:
            self._gate = prepare()
            self._applied = (AppliedRule(self._name or DEFAULT_NAME, self._gate.limits),)
            self._check: Callable[..., Decision] = (
                self._gate.fast_check(self._check_in_full) or self._check_in_full
            )
            self._bind()
        except BaseException:
            self._close()
            raise

    def _bind(self) -> None:
        """For a face to prepare what it needs of the gate."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits that a check must pass."""
        return tuple(self._gate.limits)

    @property
    def store(self) -> Store:
        """The store, to share with another limiter."""
        return self._store

    @property
    def clock(self) -> Clock:
        """What it waits by, and decides by where the store has no time of its own."""
        return self._clock

    @property
    def on_failure(self) -> FailurePolicy:
        """What it answers when the store cannot decide; a rule may say otherwise."""
        return self._on_failure

    @property
    def has_rules(self) -> bool:
        """True for a limiter that was made with `from_rules`."""
        return self._rules is not None

    @property
    def compiled_rules(self) -> CompiledRules:
        """The rules in force, compiled. They never change; a new document replaces them."""
        return self._ruled_gate().compiled_rules

    def stats(self) -> StoreStats:
        """What the store holds."""
        return self._store.stats()

    def use(self, rules: Rules, version: str = "") -> None:
        """Put other rules in force, in one step; a check that has begun keeps those it began with.

        Raises ConfigError for a document that is wrong; then the old one stays.
        """
        self._ruled_gate().use(document_of(rules), version)

    def rules_status(self) -> RulesStatus:
        """Which version of the rules is in force, where it came from, and how fresh it is."""
        version = self.compiled_rules.version
        assert self._follower is not None, "every limiter from rules has one"  # noqa: S101 - ours
        return replace(self._follower.status(), version=version)

    def counts(self) -> dict[str, RuleCounts]:
        """How often each rule allowed and denied, in this process, since it came into force."""
        return dict(self._ruled_gate().counts)

    def tally(self) -> Tally:
        """What this process has counted beside its rules: lists, errors, time on the way."""
        return self._ruled_gate().tally

    def penalties(self) -> list[Penalty]:
        """The cool-downs and blocks that this process has given and that are not over yet.

        `reset` ends those of a request, on every node.
        """
        return self._ruled_gate().watch.standing(self._clock.now_ns())

    def on_penalty(self, tell: Callable[[Penalty], None]) -> None:
        """Call `tell` with each cool-down and block that this process gives.

        It is called while the request waits, so it should be quick; what it raises is logged.
        """
        self._ruled_gate().on_penalty = tell

    def push_load(self, load: float) -> None:
        """Say how busy things are, from 0.0 (idle) to 1.0, for rules that scale by `pushed`."""
        self._ruled_gate().loads.push(load)

    def factors(self) -> dict[str, float]:
        """For each rule that follows the load, what part of its limits is in force now."""
        return self._ruled_gate().factors()

    def _ruled_gate(self) -> RuledGate | AsyncRuledGate:
        if self._rules is None:
            raise ConfigError(
                f"this limiter has limits, not rules; make it with "
                f'{type(self).__name__}.from_rules("limits.yaml")'
            )
        return self._rules

    def _asked(self, key: Key | Request, cost: int) -> tuple[str, int]:
        """Who is counted, and for how much."""
        return self._identify(key), units_of(cost, "cost")

    def _identify(self, key: Key | Request) -> str:
        if self._rules is not None:
            return cast("str", request_of(key))  # whose gate takes a request for a subject
        if not isinstance(key, Request):
            return subject_of(key)
        if self._by is None:
            raise ConfigError(
                "to check a Request, say what it is counted by: "
                'Limiter("100/minute", by=["tenant", "user"])'
            )
        return subject_of_request(key, self._by)

    def _check_in_full(self, key: Key | Request, cost: int = 1) -> Decision:
        """Every stage of a check. A store may have a shortcut that comes here when it must."""
        return self._decide(self._gate.check, key, cost)

    def _decide(
        self, verb: Callable[[str, int], Decision], key: Key | Request, cost: int
    ) -> Decision:
        subject, cost = self._asked(key, cost)
        if switches.limiting_off:
            return self._unlimited()
        try:
            return verb(subject, cost)
        except StoreError as error:
            spend = verb == self._gate.check
            return self._degraded(error, key, subject, cost, spend=spend)

    def _unlimited(self) -> Decision:
        """What a check answers while a test has limiting switched off."""
        limit = self._gate.limits[0]
        return Decision(True, limit, limit.capacity, rule=self._name)

    def _degraded(
        self, error: StoreError, key: Key | Request, subject: str, cost: int, *, spend: bool
    ) -> Decision:
        """What a check answers when the store could not decide."""
        if self._rules is None:  # rules have asked already, and are to raise the error
            self._local.note_failure(error)
            if self._on_failure in {"open", "local"}:
                asked = [Asked(self.limits, self._name, subject, cost)]
                local = self._on_failure == "local"
                address = key.ip if isinstance(key, Request) else None
                found = self._local.decide(asked if local else [], address, spend=spend)
                if found:
                    return combine_decisions(found)
        return decision_on_failure(error, self._on_failure, self._gate.limits[0], self._name)

    def result_of(self, decision: Decision) -> CheckResult:
        """Return a decision that `check` made by the limiter's own limits as `evaluate` does."""
        return self._ruling(decision)

    def _ruling(self, decision: Decision) -> CheckResult:
        """A decision by the limiter's own limits, with its grounds."""
        if switches.limiting_off:
            return CheckResult(decision, kind="unlimited")
        failed = decision.degraded and not decision.allowed and self._on_failure == "closed"
        return CheckResult(decision, self._applied, "unavailable" if failed else "limited")

    def _ttl_ns(self, ttl: Duration | None) -> int | None:
        if ttl is None:
            return None
        ttl_ns = duration_ns("ttl", ttl, WINDOW_NS_MAX + 1, "ttl=3600 (seconds)")
        if not 0 < ttl_ns <= WINDOW_NS_MAX:
            raise ConfigError(
                f"ttl={show(ttl)} is not between 1 ns and 366 days; for example ttl=3600"
            )
        return ttl_ns

    def _late_ns(self, decision: Decision, deadline_ns: int | None) -> int:
        """By how much the pause that a decision asks for would overrun; 0 if it does not."""
        pause = pause_ns(decision)
        if deadline_ns is None or pause == 0:
            return 0
        return max(self._clock.now_ns() + pause - deadline_ns, 0)

    def _deadline_ns(self, timeout: Duration | None) -> int | None:
        if timeout is None:
            return None
        return self._clock.now_ns() + duration_ns(
            "timeout", timeout, _TIMEOUT_NS_MAX, "timeout=5 (seconds)"
        )

    def _close(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        self._local.close()
        if self._owns_store:
            self._store.close()


def pause_ns(decision: Decision) -> int:
    """How long to sleep: until the turn comes, or until it is worth asking again."""
    return decision.delay_ns if decision.allowed else decision.retry_after_ns


def to_settle(reserved: int, actual: int) -> int:
    """Units still to spend for a request that was charged `reserved`; to give back, if negative."""
    return units_of(actual, "actual") - units_of(reserved, "reserved")


def less(look: Decision, units: int) -> int:
    """How many to try for where `units` do not fit: what remains, or half if that was no help.

    A rule that charges several units for each may have more remaining than fit.
    """
    return look.remaining if 0 < look.remaining < units else units // 2
