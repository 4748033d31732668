"""RegionStore: the store of one region, which shares global limits with the other regions.

It wraps the region's own Redis. Limits of the region use the counters of that store directly,
without extra cost. A global limit is decided by the same Redis: no check waits for another region.

A request may have regional and global rules: all pass, or none is charged. The regional ones are
decided together, as in every store. If they pass, the global ones are checked in turn, each in one
call. A denial refunds the charges made so far. If there are several global rules, the store first
reads all of them without a charge, so that a request that one of them denies is not charged by the
others: a refund to a bucket is only partial, because time has already refilled some of the units.

`reset` of a global limit goes to the stores of all regions. All other calls stay in the region: the
other regions learn of them from reports (`exchange.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ratekeeper.core.clock import Clock
from ratekeeper.core.errors import ConfigError, StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.core.model import DEFAULT_NAME, Consistency, Decision, Limit, Limits
from ratekeeper.core.steps import Ask, Call, Steps, Together, Undo, asking
from ratekeeper.decide.allowances import Allowances
from ratekeeper.decide.combine import uncharged
from ratekeeper.decide.fleet_monitor import FleetMonitor
from ratekeeper.decide.region_monitor import RegionMonitor
from ratekeeper.decide.regional import AcrossRegions, GlobalCounter, RegionalCounts, rule_number
from ratekeeper.decide.store import (
    Answer,
    Charge,
    Counter,
    Store,
    StoreWrapper,
    require_strict_across,
)
from ratekeeper.decide.stores import open_fallback_store
from ratekeeper.regions.exchange import RegionSync
from ratekeeper.regions.settings import Regions
from ratekeeper.regions.table import share_table

# The options of the sync's connections: timeouts are longer than those of a request, and a broken
# link is tried again every second.
_LINK_OPTIONS: Final = {"deadline_ms": 2_000, "breaker_open_max_ms": 1_000}

Checks = Sequence[tuple[Any, str, int]]
# Prepares the counters of the other regions and returns their `reset` calls, by region.
_Resets = Callable[[], Mapping[str, Callable[[str], Any]]]


class GlobalRuleCounter(GlobalCounter):
    """A global rule's limits on the store of a region. Only a reset needs the other regions."""

    __slots__ = ("_own_reset", "_resets", "check", "grant", "limits", "peek", "refund")

    def __init__(self, counter: Counter, resets: _Resets) -> None:
        self.limits = counter.limits
        self.check: Callable[[str, int], Any] = counter.check
        self.peek: Callable[[str, int], Any] = counter.peek
        self.refund: Callable[[str, int, int | None], Any] = counter.refund
        self.grant: Callable[[str, int, int | None], Any] = counter.grant
        self._own_reset = counter.reset
        self._resets = resets

    def reset(self, subject: str) -> Ask:
        """Forget the units of the subject in all regions. Raises StoreError."""
        return asking(resetting, self._own_reset, self._resets(), subject)

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: there is no compiled check."""


def resetting(
    here: Callable[[str], Any], others: Mapping[str, Callable[[str], Any]], subject: str
) -> Steps[None]:
    """Reset a subject here and in the other regions. Raises StoreError, after all were tried."""
    yield Call(here, subject)
    answers: list[Any] = yield Together([Call(reset, subject) for reset in others.values()])
    failed: dict[str, StoreError] = {}
    for region, answer in zip(others, answers, strict=True):
        if isinstance(answer, StoreError):
            failed[region] = answer
        elif isinstance(answer, BaseException):
            raise answer
    if failed:
        reasons = "; ".join(f"{region}: {error}" for region, error in failed.items())
        raise StoreUnavailable(
            f"the counts were reset, but not in {', '.join(failed)}; reset again when these "
            f"regions can be reached ({reasons})"
        )


class RegionStore(StoreWrapper):
    """The store of a node in one of several regions; limiters can share it."""

    def __init__(
        self,
        store: Store,
        regions: Regions,
        clock: Clock,
        *,
        owns_store: bool = True,
        links: Mapping[str, Store] | None = None,
    ) -> None:
        """Wrap the store of this node's region, and start the sync with the other regions.

        `owns_store`  closing this store also closes the wrapped store.
        `links`       the stores of all regions, for the sync; by default they are opened. The sync
                      has connections and breakers of its own, so it never delays a request.
        """
        counts = store.regional
        if counts is None:
            raise ConfigError(
                f"the store of the region {regions.region!r} cannot count global limits; "
                f'use a Redis, for example stores={{"{regions.region}": "redis://localhost"}}'
            )
        self.settings = regions
        super().__init__(store)
        self._counts = counts
        self._owns_store = owns_store
        self._links = dict(links or {})
        for region, uri in regions.stores.items():
            if region not in self._links:
                self._links[region] = open_fallback_store(uri, clock, **_LINK_OPTIONS)
        linked = {region: each.regional for region, each in self._links.items()}
        self._linked = {region: each for region, each in linked.items() if each is not None}
        self._sync: RegionSync | None = None
        self._waits = True
        if regions.sync:
            first = share_table(1, regions.fractions)
            self._sync = RegionSync(regions.region, first, self._linked)
            self._sync.start()

    # ── The wrapped store ──────────────────────────────────────────────────────────────────────

    @property
    def fleet(self) -> FleetMonitor | None:
        """None: a node that answers checks itself wraps this store."""

    @property
    def allowances(self) -> Allowances | None:
        """None: allowances are in the memory of the node."""

    @property
    def regional(self) -> RegionalCounts:
        """The counts of this region."""
        return self._counts

    @property
    def regions(self) -> RegionMonitor | None:
        """The regions that share global limits with this one."""
        return self._sync

    # ── Counters ───────────────────────────────────────────────────────────────────────────────

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> Counter:
        """Prepare a rule's limits."""
        if across is None:
            return self._store.counter(limits, rule, consistency)
        require_strict_across(consistency, across)
        prepared = self._named(limits, rule)
        return GlobalRuleCounter(
            self._counts.global_counter(prepared, rule, across),
            lambda: {
                region: self._linked[region].global_counter(prepared, rule, across).reset
                for region in self.settings.others
            },
        )

    def _named(self, limits: Sequence[Limit], rule: str) -> Limits:
        """Return the limits, and pass the name of their rule to the sync.

        The first global rule of a process waits for the leader of the region, for a second at most:
        the region may have no shares yet, or stale ones. Later rules do not wait, because requests
        prepare limits, too.
        """
        if self._sync is not None:
            self._sync.name_rule(rule_number(limits, rule), rule or DEFAULT_NAME)
            if self._waits:
                self._waits = False
                self._sync.wait()
        return tuple(limits)

    # ── Several subjects ───────────────────────────────────────────────────────────────────────

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = ()
    ) -> list[Answer] | Ask:
        """Check several subjects; all pass or none is charged."""
        together = self._store.check_together
        if not _has_global_counter(checks):
            return together(checks, optional)
        return asking(deciding, together, checks, optional, self.is_sharded)

    # ── Shutdown ───────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Stop the exchange with the other regions, and close an owned store."""
        self._close_links()
        if self._owns_store:
            self._store.close()

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self._close_links)
        if self._owns_store:
            await self._store.aclose()

    def _close_links(self) -> None:
        if self._sync is not None:
            self._sync.close()
        for store in self._links.values():
            store.close()


def only_region(store: Store, clock: Clock) -> RegionStore:
    """Return a store that can read the global limits of a region. It exchanges nothing."""
    # The URI is not used, because the store is given.
    regions = Regions("here", {"here": "redis://localhost"}, sync=False)
    return RegionStore(store, regions, clock, links={"here": store}, owns_store=False)


def _has_global_counter(checks: Checks) -> bool:
    for counter, _, _ in checks:  # noqa: SIM110 - `any` and its generator take twice as long
        if isinstance(counter, GlobalCounter):
            return True
    return False


def deciding(
    check_together: Callable[..., Any],
    checks: Checks,
    optional: Container[int],
    is_sharded: bool,
) -> Steps[list[Answer]]:
    """Decide the checks of a request with global rules: all pass, or none is charged."""
    own: list[int] = []
    rest: list[int] = []
    for at, (counter, _, _) in enumerate(checks):
        (rest if isinstance(counter, GlobalCounter) else own).append(at)
    answers: dict[int, Answer] = {}
    if own:
        may_fail = [place for place, at in enumerate(own) if at in optional]
        found: list[Answer] = yield Call(check_together, [checks[at] for at in own], may_fail)
        answers = dict(zip(own, found, strict=True))
    timeout = _timeout(answers, is_sharded)
    try:
        if timeout is not None:
            answers |= dict.fromkeys(rest, timeout)
        elif len(rest) > 1 or not _pass(answers, optional):
            answers |= yield from _looking(checks, rest)
        if _pass(answers, optional):
            yield from _charging(checks, rest, answers, optional)
    except BaseException:
        yield from _refunding(checks, answers)
        raise
    if not _pass(answers, optional):
        yield from _refunding(checks, answers)
    return [answers[at] for at in range(len(checks))]


def _pass(answers: Mapping[int, Answer], optional: Container[int]) -> bool:
    return all(
        at in optional if isinstance(answer, StoreError) else answer.allowed
        for at, answer in answers.items()
    )


def _timeout(answers: Mapping[int, Answer], is_sharded: bool) -> StoreTimeout | None:
    """Return a timeout if there is one server: a request waits for it only once."""
    if is_sharded:
        return None
    return next((each for each in answers.values() if isinstance(each, StoreTimeout)), None)


def _looking(checks: Checks, rest: Sequence[int]) -> Steps[dict[int, Answer]]:
    """Return the answers to the global checks without a charge. Raises CapacityError."""
    calls = [Call(checks[at][0].peek, *checks[at][1:]) for at in rest]
    looked: list[Any] = yield Together(calls)
    for each in looked:
        if isinstance(each, BaseException) and not isinstance(each, StoreError):
            raise each
    return dict(zip(rest, looked, strict=True))


def _charging(
    checks: Checks, rest: Sequence[int], answers: dict[int, Answer], optional: Container[int]
) -> Steps[None]:
    """Check the global rules in turn, until one of them ends the request."""
    for at in rest:
        if isinstance(answers.get(at), StoreError):
            continue  # reading it has failed: it is not tried twice
        counter, subject, cost = checks[at]
        try:
            answers[at] = yield Call(counter.check, subject, cost)
        except StoreError as error:
            answers[at] = error
        if not _pass({at: answers[at]}, optional):
            return


def _refunding(checks: Checks, answers: dict[int, Answer]) -> Steps[None]:
    """Refund the charges of a request that was denied or failed."""
    for at, answer in answers.items():
        if isinstance(answer, StoreError) or answer.charged_ns is None:
            continue
        counter, subject, cost = checks[at]
        with suppress(StoreError):
            yield Undo(counter.refund, subject, cost, answer.charged_ns)
        answers[at] = uncharged(answer, cost)
