"""The rule engine: a rule document in force on a store.

It compiles the document (`compiled.py`), prepares the store for it, and swaps in later documents
and entries. Each verb of a limiter reads `compiled_rules` once, so that a document that is swapped
in meanwhile applies to the next call. `limiter/path.py` decides.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

from ratekeeper.core.clock import Clock
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import UNLIMITED, Request
from ratekeeper.decide.store import (
    NEEDS_AUTHORITY,
    NEEDS_REGIONS,
    CheckedRule,
    LocalStore,
    RequestCheck,
    Store,
)
from ratekeeper.fleet.store import FleetStore
from ratekeeper.metrics.tally import Counts
from ratekeeper.regions.settings import Regions, require_shares
from ratekeeper.rules.compiled import FACTOR_STEPS, CompiledRules, RuleCheck, Shape, factor_step
from ratekeeper.rules.document.model import Document, Rule
from ratekeeper.rules.entry_table import EntryTable
from ratekeeper.rules.explain import Explanation, explain
from ratekeeper.rules.load import Factor, Loads, SourceFactor
from ratekeeper.rules.penalties import Penalties
from ratekeeper.rules.splitting import part_count, part_limits


class RuleEngine:
    """A rule document in force on a store."""

    def __init__(
        self,
        store: Store,
        document: Document,
        clock: Clock,
        counts: Counts,
        version: str = "",
        *,
        entries: EntryTable | None = None,
        regions: Regions | None = None,
    ) -> None:
        """Put a document in force on a store.

        `clock`       the time by which overrides end and factors are smoothed.
        `counts`      where the limiter counts; those of rules that are gone are forgotten.
        `entries`     the assignments, overrides and list entries beside the document.
        `regions`     the regions that share rules with `scope: global`.
        """
        self.loads = Loads(clock.now_ns)
        self._counts = counts
        self._store = store
        self._make_counter = store.counter
        self._now_ns = clock.now_ns
        self._regions = regions
        self._use_lock = fork_safe(threading.Lock())
        self._factors: dict[str, Factor] = {}
        self.penalties = Penalties(clock, store.counter, counts.of)
        self.compiled_rules = self._compile(document, version, entries or EntryTable())

    def use(self, document: Document, version: str = "") -> None:
        """Put another document in force, in one step. Raises ConfigError and keeps the old one."""
        with self._use_lock:
            entries = self.compiled_rules.entries
            self.compiled_rules = self._compile(document, version, entries)
            self._counts.keep({rule.id for rule in document.rules})

    def _compile_check(self, rules: Sequence[CheckedRule], owner: Shape) -> RequestCheck | None:
        if not self._store.is_local:
            return None
        counts = self._counts
        local = cast("LocalStore", self._store)
        return local.request_check(rules, counts.compiled, owner, counts.tally.subjects.sample)

    def use_entries(self, entries: EntryTable) -> None:
        """Put entries in force, or apply a change of those in force. It compiles nothing."""
        with self._use_lock:
            self.compiled_rules = self.compiled_rules.with_entries(entries)

    def _compile(self, document: Document, version: str, entries: EntryTable) -> CompiledRules:
        self.require_usable(document)
        self._prepare(document)
        factors: dict[str, Factor] = {}
        for rule in document.rules:
            if not rule.scale:
                continue
            factor = self._factors.get(rule.id)
            if factor is None or factor.scales != rule.scale:
                factor = Factor(rule.scale, self.loads.reading, self._now_ns)
            factors[rule.id] = factor
        self.loads.follow(scale.source for rule in document.rules for scale in rule.scale)
        compiled = CompiledRules(
            document,
            self._make_counter,
            self._now_ns,
            version,
            factors,
            entries,
            self._compile_check,
        )
        self._factors = factors
        self.penalties.use(document)
        if isinstance(self._store, FleetStore) and self._store.fleet is not None:
            self._store.fleet.use_rules(compiled.version)
        return compiled

    def require_usable(self, document: Document) -> None:
        """Raise ConfigError if this store cannot count the document's rules as it says. No I/O."""
        place, consistency = next(document.not_strict(), ("", "strict"))
        if consistency != "strict" and not isinstance(self._store, FleetStore):
            raise ConfigError(
                f"{place}: consistency: {consistency} does not work here: {NEEDS_AUTHORITY}"
            )
        for rule in document.rules:
            if rule.across is None:
                continue
            if self._regions is None:
                raise ConfigError(
                    f"rule {rule.id}: scope: global does not work without regions: {NEEDS_REGIONS}"
                )
            if rule.across == "exact":
                self._require_exact(self._regions, document, rule)

    @staticmethod
    def _require_exact(regions: Regions, document: Document, rule: Rule) -> None:
        """Raise ConfigError if a region's share of an exact rule is less than one unit."""
        # Imported here: most documents have no exact rules.
        from ratekeeper.rules.document.safety import limits_at  # noqa: PLC0415 - see above

        for found in document.limit_sets(rule):
            if found.limits:
                parts = part_count(found.limits, rule.split)
                where = limits_at(f"rule {rule.id}", found)
                require_shares(regions, part_limits(found.limits, parts, parts - 1), where)

    def _prepare(self, document: Document) -> None:
        """Prepare the store for rules that nodes or regions share."""
        if isinstance(self._store, FleetStore) and any(document.not_strict()):
            self._store.open_node()  # one that cannot be used is an error at startup
        found = [rule for rule in document.rules if rule.across is not None]
        for rule in found:
            # The first global rule of a process waits for the leader of the region.
            self._make_counter((UNLIMITED,), rule.id, across=rule.across)

    def factors(self) -> dict[str, float]:
        """Return the factor of its limits, for each rule that follows the load."""
        return {
            rule: factor_step(factor()) / FACTOR_STEPS for rule, factor in self._factors.items()
        }

    def factors_by_source(self) -> dict[str, list[SourceFactor]]:
        """Return the factor by each load, for each rule that follows the load."""
        return {rule: factor.by_source() for rule, factor in self._factors.items()}

    def explained(self, request: Request, cost: int) -> tuple[Explanation, list[RuleCheck | None]]:
        """Explain which rules apply and why. It examines every rule: 10,000 take 100 ms."""
        return explain(self.compiled_rules, request, cost)
