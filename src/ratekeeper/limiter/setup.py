"""Setting up a limiter: its parts, how it starts and closes, and its statistics.

A limiter has either limits of its own (`OwnLimits`) or a rule document in force on its store
(`RuleEngine`). `path.py` has the path of a check, `verbs.py` the other verbs; this module has the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, clock_of
from ratekeeper.core.costs import REQUESTS, Cost, Costs
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import (
    DEFAULT_NAME,
    UNLIMITED,
    AppliedRule,
    Consistency,
    Decision,
    Limit,
    Limits,
    Request,
    check_consistency,
    check_name,
)
from ratekeeper.core.rates import LimitsArgument, limits_of
from ratekeeper.core.subjects import check_by
from ratekeeper.decide.failure import (
    FailurePolicy,
    LocalFallback,
    LocalLimits,
    check_policy,
    local_fallback_of,
)
from ratekeeper.decide.fleet_monitor import FleetMonitor
from ratekeeper.decide.region_monitor import RegionMonitor
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import FastCheck, Store, StoreStats, shared_store
from ratekeeper.decide.stores import store_of
from ratekeeper.fleet.settings import Fleet, fleet_of
from ratekeeper.fleet.store import FleetStore, fleet_store_of, shared_counts_of
from ratekeeper.limiter.arguments import explains
from ratekeeper.limiter.own_limits import OwnLimits
from ratekeeper.limiter.path import CheckPath
from ratekeeper.limiter.verbs import LimiterVerbs
from ratekeeper.limiter.waiting import WaitingQueues, queues_of
from ratekeeper.metrics.counters import ANY_ENDPOINT, LIMITERS
from ratekeeper.metrics.tally import Counts, RuleCounts, Tally
from ratekeeper.regions.settings import Regions, Scope, across_of, regions_of, require_shares
from ratekeeper.regions.store import RegionStore, require_shared
from ratekeeper.rules.compiled import CompiledRules
from ratekeeper.rules.document.model import Document, Rules
from ratekeeper.rules.engine import RuleEngine
from ratekeeper.rules.entry_table import EntryTable
from ratekeeper.rules.load import Loads, SourceFactor
from ratekeeper.rules.penalties import Penalties, Penalty
from ratekeeper.rules.prices import costs_of_usage

if TYPE_CHECKING:
    from ratekeeper.control.follow import Follower, LoadedRules, RulesStatus


class LimiterSetup(LimiterVerbs):
    """The parts that both limiters have, and everything that is not a check."""

    _consistency: Consistency = "strict"
    endpoint: str = ANY_ENDPOINT
    """The routes that its limits are for, as metrics name them."""
    _follower: Follower | None = None
    _fast: FastCheck | None = None
    """The store's compiled check of the limiter's own limits."""
    _counts: Counts
    _regions: Regions | None = None
    """The regions that share the global limits of the store."""

    @explains("{}(…)", '{}("100/minute", store="redis://localhost")')
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
        consistency: Consistency = "strict",
        fleet: Fleet | None = None,
        regions: Regions | None = None,
        scope: Scope = "region",
        across_regions: AcrossRegions | None = None,
    ) -> None:
        """Prepare `limits` on a store.

        `limits`          a rate string, a Limit, or several of either; all must pass.
        `store`           a URI, or a store to share with another limiter.
        `clock`           the source of time; by default the system clock. A store that is passed
                          in decides by its own clock, and this one is for waiting.
        `name`            keeps limiters on one store apart, and names this one in its decisions.
        `by`              the fields that a Request is counted by: `["tenant", "user"]`.
        `on_failure`      the answer when the store cannot decide: open, closed, local or raise.
        `local_fallback`  a `LocalFallback`: how `local` limits while the store is unavailable.
        `consistency`     strict: the store decides every check. On Redis also leased: this node
                          decides most checks, from units that it takes in advance; and eventual:
                          it decides while a key is far from its limit, and reports afterwards.
        `fleet`           a `Fleet`: how this node decides leased and eventual limits, and which
                          other nodes there are.
        `regions`         a `Regions`: the regions that share global limits, and the one that this
                          node is in. Its Redis is then the store.
        `scope`           region: the limits count the units spent in this region. global: the
                          units spent in all regions.
        `across_regions`  how regions share global limits. eventual (the default): the share of a
                          region follows its demand; a region that is cut off goes on alone, and
                          may exceed the limits. exact: each region has a fixed share, and the
                          limits are never exceeded.
        """
        check_name("name", name)
        check_consistency(consistency)
        self._consistency = consistency
        across = across_of(scope, across_regions, consistency)
        prepared = limits_of(limits)
        counted_by = check_by(by) if by is not None else None
        self._name = name
        uses_fleet = consistency != "strict" or fleet is not None
        self._start(
            store,
            clock,
            on_failure,
            local_fallback,
            lambda: self._prepare_limits(prepared, counted_by, across),
            fleet_of(fleet) if uses_fleet else None,
            regions,
        )
        LIMITERS[id(self)] = self

    @classmethod
    @explains("{}.from_rules(…)", '{}.from_rules("limits.yaml")')
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
        fleet: Fleet | None = None,
        regions: Regions | None = None,
    ) -> Self:
        """Return a limiter whose limits come from a rule document; `check` takes a Request.

        `rules`       the path of a document, its text, a Document, or the URL of a database
                      ("sqlite:///rules.db", "postgresql://app@host/rules").
        `store`, `clock` and `on_failure`  as in the constructor; a rule's own `on_failure` takes
                      precedence.
        `local_fallback`  how `on_failure: local` limits while the store is unavailable.
        `follow`      put every later version of the file or database into force.
        `poll`        look for a new version every so many seconds, even without a notification.
        `snapshot`    a file that keeps the last good rules, for a start while `rules` is
                      unavailable.
        `fleet`       how this node decides rules with `consistency: leased` or `eventual`.
        `regions`     the regions that share rules with `scope: global`, as in the constructor.

        Blocks until the rules are read; a background thread follows them. Raises ConfigError for
        an invalid document, with every error in it, and for a database without rules;
        StoreUnavailable for a database that cannot be reached.
        """
        # Imported here: a limiter with limits needs nothing that reads and follows documents.
        from ratekeeper.control.follow import (  # noqa: PLC0415 - see above
            Follower,
            FollowOptions,
            load,
            poll_s_of,
        )

        self = cls.__new__(cls)
        self._name = ""
        options = FollowOptions(poll_s_of(poll), None if snapshot is None else Path(snapshot))
        loaded = load(rules, options.snapshot)
        self._start(
            store,
            clock,
            on_failure,
            local_fallback,
            lambda: self._prepare_rules(loaded),
            fleet_of(fleet),  # also if no rule needs it now: a later version of the rules may
            regions,
        )
        self._follower = Follower(self, rules, loaded, options, self._store)
        LIMITERS[id(self)] = self  # not earlier: metrics read the status of the follower
        if follow:
            self._follower.start()
        return self

    def _start(
        self,
        store: str | Store,
        clock: Clock | None,
        on_failure: FailurePolicy,
        local_fallback: LocalFallback | None,
        prepare: Callable[[], Penalties],
        fleet: Fleet | None,
        regions: Regions | None,
    ) -> None:
        check_policy(on_failure)
        self._on_failure = on_failure
        self._clock = clock_of(clock)
        self._local_fallback = local_fallback_of(local_fallback)
        self._local = LocalLimits(self._local_fallback, self._clock)
        self._store, self._owns_store = node_store_of(store, fleet, regions, self._clock)
        self._queues = queues_of(self._store)
        self._regions = regions_in(self._store)
        shared = shared_store(self._store)
        self._local.monitor = None if shared is None else shared.monitor
        self._local.fleet = shared_counts_of(self._store)
        self._counts = Counts()
        try:
            self._path = CheckPath(
                self._store, on_failure, self._local, self._counts, prepare(), self._regions
            )
            self._bind()
        except BaseException:
            self._close()
            raise

    def _prepare_limits(
        self, limits: Limits, by: tuple[str, ...] | None, across: AcrossRegions | None
    ) -> Penalties:
        """Prepare the limiter's own limits; return penalties, which they never give."""
        if across == "exact" and self._regions is not None:
            require_shares(self._regions, limits, f"limiter {self._name or DEFAULT_NAME}")
        own = OwnLimits(self._store, limits, self._name, by, self._consistency, across)
        self._own = own
        self._fast = own.counter.fast_check(self._check)
        return Penalties(self._clock, self._store.counter, self._counts.of)

    def _prepare_rules(self, loaded: LoadedRules) -> Penalties:
        """Put a rule document in force; return the penalties of its rules."""
        self._engine = RuleEngine(
            self._store,
            loaded.document,
            self._clock,
            self._counts,
            loaded.status.version,
            entries=loaded.entries,
            regions=self._regions,
        )
        return self._engine.penalties

    def _quick_check(self) -> Callable[..., Decision]:
        """Return `check` for this thread, without the calls in between that a check can do without.

        For plain limits in memory it is the kernel's own function.
        """
        if self._fast is not None:
            return self._fast.check
        engine = self._engine
        return self._check if engine is None else _check_of_rules(engine, self._check)

    def _bind(self) -> None:
        """Bind the calls of this kind of limiter, once the limits or the rules are ready."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The limiter's name in decisions and metrics; empty if it has none."""
        return self._name

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits that a check must pass."""
        return (UNLIMITED,) if self._own is None else self._own.limits

    @property
    def applied(self) -> tuple[AppliedRule, ...]:
        """The limiter's own limits, as its results list them; empty for rules."""
        return () if self._own is None else self._own.applied

    @property
    def store(self) -> Store:
        """The store, to share with another limiter."""
        return self._store

    @property
    def queues(self) -> WaitingQueues:
        """The requests of this process that wait for room, on all limiters of the store."""
        return self._queues

    @property
    def fleet(self) -> FleetMonitor | None:
        """The nodes that share the limits; None as long as the store decides every check."""
        return self._store.fleet if isinstance(self._store, FleetStore) else None

    @property
    def regions(self) -> RegionMonitor | None:
        """The regions that share global limits, as an operator sees them; None without regions."""
        store = _region_store_in(self._store)
        return None if store is None else store.regions

    @property
    def consistency(self) -> Consistency:
        """Who decides the limiter's own limits: the store, or this node where it can."""
        return self._consistency

    @property
    def clock(self) -> Clock:
        """The clock for waiting, and for decisions if the store has no clock of its own."""
        return self._clock

    @property
    def on_failure(self) -> FailurePolicy:
        """The answer when the store cannot decide; a rule's own policy takes precedence."""
        return self._on_failure

    @property
    def local_fallback(self) -> LocalFallback:
        """How `on_failure="local"` limits while the store is unavailable."""
        return self._local_fallback

    @property
    def compiled_rules(self) -> CompiledRules:
        """The rules in force, compiled. They never change; a new document replaces them."""
        return self._rules().compiled_rules

    @property
    def units(self) -> tuple[str, ...]:
        """What the limits count: requests, and the units of the rules."""
        return (REQUESTS,) if self._engine is None else self.compiled_rules.units

    @property
    def has_rules(self) -> bool:
        """True for a limiter that was made with `from_rules`."""
        return self._engine is not None

    def costs_of(self, model: str, usage: Mapping[str, int]) -> dict[str, int]:
        """Return what the usage of a language model costs, in the units that the rules count.

        `usage` is the number of tokens by kind, as in the `prices` of the rules:
        `{"input": 900, "output": 300}`. The costs are `tokens`, all of them; `input_tokens` and so
        on, of one kind; and `micro_dollars`, by the prices of the model, rounded up.

        Raises ConfigError for a model or a kind without a price: no usage is free by a slip.
        """
        rules = self.compiled_rules
        return costs_of_usage(rules.document.prices, rules.units, model, usage)

    def stats(self) -> StoreStats:
        """Return the statistics of the store."""
        return self._store.stats()

    def use(self, rules: Rules, version: str = "") -> None:
        """Put other rules in force, in one step. A check in progress keeps the old ones.

        Raises ConfigError for an invalid document, and keeps the old one.
        """
        # Imported at its first use: limits without rules do not need the document reader.
        from ratekeeper.rules.document.reading import document_of  # noqa: PLC0415 - see above

        self._rules().use(document_of(rules), version)

    def require_usable(self, document: Document) -> None:
        """Raise ConfigError if this store cannot count a document's rules as it says. No I/O."""
        self._rules().require_usable(document)

    def use_entries(self, entries: EntryTable) -> None:
        """Put the entries that extend the document in force, or apply their changes."""
        self._rules().use_entries(entries)

    def rules_status(self) -> RulesStatus:
        """Return the version of the rules in force, where they came from, and their age."""
        version = self.compiled_rules.version
        assert self._follower is not None, "every limiter from rules has one"  # noqa: S101 - ours
        return replace(self._follower.status(), version=version)

    def counts(self) -> dict[str, RuleCounts]:
        """Return how often each rule allowed and denied in this process since it was loaded.

        A limiter without rules has one entry, under its name, or "default" if it has none.
        """
        if self._own is None:
            return self._counts.of_rules()
        own = self._counts.of(self._name)
        allowed, denied = self._counted_fast()
        found = replace(own, allowed=own.allowed + allowed, denied=own.denied + denied)
        return {self._name or DEFAULT_NAME: found}

    def _counted_fast(self) -> tuple[int, int]:
        """Return how many checks the store's compiled check has allowed and denied."""
        return (0, 0) if self._fast is None else self._fast.counted()

    def count_errors_in(self, errors: dict[str, int]) -> None:
        """Count the errors of the store there, by kind: several limiters can share the counts."""
        self._counts.tally.errors = errors

    def tally(self) -> Tally:
        """Return the checks of this process, each counted once, and the errors of the store."""
        tally = self._counts.of_checks()
        allowed, denied = self._counted_fast()
        return replace(tally, allowed=tally.allowed + allowed, denied=tally.denied + denied)

    def penalties(self) -> list[Penalty]:
        """Return the cool-downs and blocks that this process gave and that are not over.

        `reset` ends those of a request, on every node.
        """
        return self._rules().penalties.tracker.active(self._clock.now_ns())

    def on_penalty(self, callback: Callable[[Penalty], None]) -> None:
        """Call `callback` with each cool-down and block that this process gives.

        The request waits for it, so it should be quick. An exception is logged.
        """
        self._rules().penalties.listener = callback

    def push_load(
        self, load: float, name: str = "pushed", *, valid_for: float | None = None
    ) -> None:
        """Set a load in this process, for rules whose `scale` has this name as its `source`.

        `load`       a number that is not negative; for `pushed`, from 0.0 (idle) to 1.0.
        `valid_for`  the seconds after which it is stale; None: each rule's `stale_after`.

        Raises ConfigError for any other number, and for a name that no rule follows.
        """
        self._rules().loads.push(load, name, valid_for)

    def factors(self) -> dict[str, float]:
        """Return the factor of its limits, for each rule that follows the load."""
        return self._rules().factors()

    @property
    def loads(self) -> Loads:
        """The loads that the rules follow, as this process knows them."""
        return self._rules().loads

    def factors_by_source(self) -> dict[str, list[SourceFactor]]:
        """Return the factor by each load, for each rule that follows the load."""
        return self._rules().factors_by_source()

    def share_local_counts(self, other: LimiterSetup) -> None:
        """Count with `other` on this machine while the store is unavailable."""
        if self._local is not other._local:
            self._local.close()
            self._local = self._path.local = other._local

    def _close(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        self._local.close()
        if self._owns_store:
            self._store.close()


def _check_of_rules(
    engine: RuleEngine, fallback: Callable[..., Decision]
) -> Callable[..., Decision]:
    """Return a check that calls `fallback` for anything but a Request whose check is compiled."""

    def check(request: Request, cost: Cost = 1, *, costs: Costs | None = None) -> Decision:
        if (
            costs is None
            and type(request) is Request
            and type(cost) is int
            and cost == 1
            and not switches.limiting_off
        ):
            found = engine.compiled_rules.compiled(request)
            if found is not None:
                decision = found[1].check(request)
                if decision is not None:
                    return decision
        return fallback(request, cost, costs=costs)

    return check


def node_store_of(
    store: str | Store, fleet: Fleet | None, regions: Regions | None, clock: Clock
) -> tuple[Store, bool]:
    """Return the store of a node, and True if the caller has to close it.

    It is opened if `store` is a URI, and wrapped for the node's region and fleet. Raises
    ConfigError.
    """
    given = store
    regions = regions_of(regions)
    if regions is not None and isinstance(store, str):
        store = _store_of_region(store, regions)
    opened = store_of(store, clock)
    is_opened = opened is not given
    found = opened
    try:
        if regions is not None:
            found = _in_region(found, regions, clock, owned=is_opened)
        if fleet is not None:
            region = "" if regions is None else regions.region
            found = fleet_store_of(found, fleet, clock, owned=found is not given, region=region)
    except BaseException:
        if is_opened:
            found.close()
        raise
    return found, found is not given


def _in_region(store: Store, regions: Regions, clock: Clock, *, owned: bool) -> Store:
    """Return a store wrapped for its region. One that is wrapped already keeps its regions."""
    known = regions_in(store)
    if known is None and not isinstance(store, FleetStore):
        shared = require_shared(store, regions.region)
        return RegionStore(shared, regions, clock, owns_store=owned)
    if known != regions:
        kind = "without" if known is None else "with other"
        raise ConfigError(
            f"this store belongs to a limiter {kind} regions; omit regions, or omit store"
        )
    return store


def _store_of_region(store: str, regions: Regions) -> str:
    if store not in ("memory://", regions.store):
        raise ConfigError(
            f"store has no effect with regions: the store is that of the region "
            f"{regions.region!r} in the table of regions; omit store"
        )
    return regions.store


def regions_in(store: Store) -> Regions | None:
    """Return the regions of the store of a node, if it has any."""
    found = _region_store_in(store)
    return None if found is None else found.settings


def _region_store_in(store: Store) -> RegionStore | None:
    wrapped = store.wrapped if isinstance(store, FleetStore) else store
    return wrapped if isinstance(wrapped, RegionStore) else None
