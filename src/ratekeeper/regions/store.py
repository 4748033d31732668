"""RegionStore: the store of one region, which shares global limits with the other regions.

It wraps the region's own Redis. Limits of the region use the counters of that store directly,
without extra cost. A global limit is decided by the same Redis: no check waits for another region.

A request may have regional and global rules: all pass, or none is charged (`decide/decider.py`).
The regional rules are one group, and each global rule is a group of its own.

`reset` of a global limit goes to the stores of all regions. All other calls stay in the region: the
other regions learn of them from reports (`exchange.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

from ratekeeper.core.clock import Clock
from ratekeeper.core.errors import ConfigError, StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.core.model import DEFAULT_NAME, Consistency, Decision, Limit, Limits
from ratekeeper.core.steps import Ask, Call, Steps, Together, asking
from ratekeeper.decide.decider import Group, alone, deciding
from ratekeeper.decide.region_monitor import RegionMonitor
from ratekeeper.decide.regional import AcrossRegions, GlobalCounter, rule_number
from ratekeeper.decide.store import (
    Answer,
    Charge,
    Counter,
    SharedStore,
    Store,
    StoreWrapper,
    require_strict_across,
    shared_store,
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


def _timing_out(
    together: Callable[..., Any], checks: Sequence[Charge], optional: Container[int]
) -> Steps[list[Answer]]:
    """Check several subjects. Raises StoreTimeout if none of them was answered in time.

    Then a thread makes no further call to this server for the same request (`Together`).
    """
    answers: list[Answer] = yield Call(together, checks, optional)
    for answer in answers:
        if not isinstance(answer, StoreTimeout):
            return answers
    raise answers[0]  # type: ignore[misc]  # all of them are errors


class RegionStore(StoreWrapper):
    """The store of a node in one of several regions; limiters can share it."""

    def __init__(
        self,
        store: SharedStore,
        regions: Regions,
        clock: Clock,
        *,
        owns_store: bool = True,
        links: Mapping[str, SharedStore] | None = None,
    ) -> None:
        """Wrap the store of this node's region, and start the sync with the other regions.

        `owns_store`  closing this store also closes the wrapped store.
        `links`       the stores of all regions, for the sync; by default they are opened. The sync
                      has connections and breakers of its own, so it never delays a request.
        """
        self.settings = regions
        super().__init__(store)
        self._owns_store = owns_store
        self._links = dict(links or {})
        for region, uri in regions.stores.items():
            if region not in self._links:
                opened = open_fallback_store(uri, clock, **_LINK_OPTIONS)
                self._links[region] = require_shared(opened, region)
        self._linked = {region: each.regional for region, each in self._links.items()}
        self._sync: RegionSync | None = None
        self._waits = True
        if regions.sync:
            first = share_table(1, regions.fractions)
            self._sync = RegionSync(regions.region, first, self._linked)
            self._sync.start()

    # ── The wrapped store ──────────────────────────────────────────────────────────────────────

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
            self._store.regional.global_counter(prepared, rule, across),
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
        places: list[list[int]] = [[], []]
        for at, (counter, _, _) in enumerate(checks):
            places[isinstance(counter, GlobalCounter)].append(at)
        regional, shared = places
        if not shared:
            return together(checks, optional)
        groups = [Group(self._regional_together, regional)] if regional else []
        groups += [Group(alone, [at]) for at in shared]
        return asking(deciding, groups, checks, optional)

    def _regional_together(
        self, checks: Sequence[Charge], optional: Container[int]
    ) -> list[Answer] | Ask:
        return asking(_timing_out, self._store.check_together, checks, optional)

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


def require_shared(store: Store, region: str) -> SharedStore:
    """Return the store of a region. Raises ConfigError if it is local."""
    found = shared_store(store)
    if found is None:
        raise ConfigError(
            f"the store of the region {region!r} cannot count global limits; "
            f'use a Redis, for example stores={{"{region}": "redis://localhost"}}'
        )
    return found


def only_region(store: SharedStore, clock: Clock) -> RegionStore:
    """Return a store that can read the global limits of a region. It exchanges nothing."""
    # The URI is not used, because the store is given.
    regions = Regions("here", {"here": "redis://localhost"}, sync=False)
    return RegionStore(store, regions, clock, links={"here": store}, owns_store=False)
