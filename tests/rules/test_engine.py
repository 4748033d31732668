"""The rule engine: the decisions of a limiter with rules, on every kind of store."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    Decision,
    Limit,
    Limiter,
    LimitExceeded,
    Request,
    StoreFull,
    StoreUnavailable,
)
from ratekeeper.core.model import DENIED_NS
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.entries import EntryRow
from ratekeeper.rules.entry_table import EntryTable
from ratekeeper.rules.explain import Explanation
from ratekeeper.testing import ManualClock, limiting_off
from tests.failing_store import PartlyFailing
from tests.redis_servers import running

TWO_RULES = """
version: 1
rules:
  - {id: user, by: user, limits: 3/minute}
  - {id: tenant, by: tenant, limits: 5/minute}
"""
ANN = Request(user="ann", tenant="acme")
BOB = Request(user="bob", tenant="acme")


def answers(limiter: Limiter, *requests: Request) -> list[bool]:
    return [bool(limiter.check(request)) for request in requests]


def left(explanation: Explanation) -> list[int]:
    """Return the remaining units of each rule that applies."""
    decisions = [rule.decision for rule in explanation.rules]
    return [decision.remaining for decision in decisions if decision is not None]


# ------------------------------------------------------------------------------------- refunds

IN_EIGHT_PARTS = """
version: 1
rules: [{id: all, by: [], limits: 80/minute, split: 8}]
"""


def test_a_late_refund_returns_no_quota_twice(store: Store, clock: ManualClock) -> None:
    """Each rule refunds by the time of its own charge. A minute later nothing is left of it."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    held = [limiter.check(ANN) for _ in range(3)]
    clock.advance(60)
    assert answers(limiter, ANN, ANN, ANN, BOB, BOB) == [True] * 5
    for decision in held:
        limiter.refund(ANN, decision=decision)
    assert left(limiter.explain(ANN)) == [0, 0]


def test_a_refund_at_once_returns_to_every_rule(store: Store, clock: ManualClock) -> None:
    """A decision knows every rule that it charged, and a part of the cost can be refunded."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    decision = limiter.check(ANN, 3)
    limiter.refund(ANN, 1, decision)
    assert left(limiter.explain(ANN)) == [1, 3]
    limiter.refund(ANN, 2, decision)
    assert left(limiter.explain(ANN)) == [3, 5]


def test_a_refund_goes_to_the_rules_that_were_charged(store: Store, clock: ManualClock) -> None:
    """The rules changed after the check: the user is refunded, and not the address, which the new
    rule of the same name counts by."""
    request = Request(user="ann", ip="192.0.2.1")
    limiter = Limiter.from_rules(
        "{version: 1, rules: [{id: r, by: user, limits: 3/minute}]}", store=store, clock=clock
    )
    decision = limiter.check(request, 2)
    limiter.use("{version: 1, rules: [{id: r, by: ip, limits: 3/minute}]}")
    limiter.check(request, 2)
    limiter.refund(request, 2, decision)
    assert limiter.peek(request).remaining == 1
    limiter.use("{version: 1, rules: [{id: r, by: user, limits: 3/minute}]}")
    assert limiter.peek(request).remaining == 3


def test_a_refund_goes_to_the_part_that_was_charged(store: Store, clock: ManualClock) -> None:
    """With a split rule, every refund finds the units of its own check."""
    limiter = Limiter.from_rules(IN_EIGHT_PARTS, store=store, clock=clock)
    decisions = [limiter.check(ANN) for _ in range(40)]
    for decision in decisions:
        if decision.allowed:
            limiter.refund(ANN, decision=decision)
    assert limiter.peek(ANN).remaining == 80


def test_a_refund_returns_the_units_of_shadow_rules(store: Store, clock: ManualClock) -> None:
    """A shadow rule counts what it would count if it were enforced."""
    text = """
version: 1
rules:
  - {id: user, by: user, limits: 3/minute, mode: MODE}
  - {id: tenant, by: tenant, limits: 5/minute, mode: shadow}
"""
    for mode in ("enforce", "shadow"):
        limiter = Limiter.from_rules(text.replace("MODE", mode), store=store, clock=clock)
        limiter.refund(ANN, 3, limiter.check(ANN, 3))
        limiter.use(TWO_RULES)
        assert left(limiter.explain(ANN)) == [3, 5]


def test_a_denied_decision_refunds_nothing(store: Store, clock: ManualClock) -> None:
    """It spent nothing, so there is nothing to return."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    limiter.check(ANN, 3)
    denied = limiter.check(ANN, 3)
    limiter.refund(ANN, 3, denied)
    assert left(limiter.explain(ANN)) == [0, 2]


def test_a_decision_from_a_pickle_refunds_its_own_rule(store: Store, clock: ManualClock) -> None:
    """A copy has the rule and the time of the charge, and no more."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    copy = pickle.loads(pickle.dumps(limiter.check(ANN, 3)))
    limiter.refund(ANN, 3, copy)
    assert left(limiter.explain(ANN)) == [3, 2]


def test_a_refund_takes_a_decision_and_nothing_else(store: Store, clock: ManualClock) -> None:
    """The error says what to pass."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    with pytest.raises(ConfigError, match="is not a Decision; pass the one that check returned"):
        limiter.refund(ANN, 1, True)  # type: ignore[arg-type]  # on purpose


# ------------------------------------------------------------------------------- several rules


def test_all_rules_pass_or_none_is_charged(store: Store, clock: ManualClock) -> None:
    """A request that one rule denies costs nothing under the others."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    assert answers(limiter, ANN, ANN, ANN, ANN) == [True, True, True, False]
    assert left(limiter.explain(BOB)) == [3, 2]
    assert answers(limiter, BOB, BOB, BOB) == [True, True, False]
    assert left(limiter.explain(BOB)) == [1, 0]


async def test_all_rules_pass_or_none_is_charged_on_asyncio(
    store: Store, clock: ManualClock
) -> None:
    """On asyncio, too, a denied request costs nothing."""
    limiter = AsyncLimiter.from_rules(TWO_RULES, store=store, clock=clock)
    requests = [ANN, ANN, ANN, ANN, BOB, BOB, BOB]
    found = [bool(await limiter.check(each)) for each in requests]
    assert found == [True, True, True, False, True, True, False]
    assert left(await limiter.explain(BOB)) == [1, 0]


def test_many_threads_never_exceed_any_rule(store: Store, clock: ManualClock) -> None:
    """In any order, no rule exceeds its limit and no denied request stays charged."""
    rules = TWO_RULES.replace("3/minute", "30/minute").replace("5/minute", "50/minute")
    limiter = Limiter.from_rules(rules, store=store, clock=clock)
    users = [Request(user=name, tenant="acme") for name in ("ann", "bob", "cid")]
    admitted: list[str | None] = []

    def check(request: Request) -> None:
        admitted.extend(request.user for _ in range(40) if limiter.check(request))

    threads = [threading.Thread(target=check, args=(user,)) for user in users * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    per_user = [admitted.count(user.user) for user in users]
    assert max(per_user) <= 30
    assert sum(per_user) <= 50
    spent = [[30 - user, 50 - tenant] for user, tenant in map(left, map(limiter.explain, users))]
    assert spent == [[count, sum(per_user)] for count in per_user]


def test_the_tightest_rule_is_reported(clock: ManualClock) -> None:
    """The decision is that of the rule with the fewest units left; the retry time is the
    longest."""
    limiter = Limiter.from_rules(TWO_RULES, clock=clock)
    decision = limiter.check(ANN)
    assert (decision.rule, decision.remaining, decision.limit) == ("user", 2, 3)
    answers(limiter, BOB, BOB, BOB)
    decision = limiter.check(ANN)
    assert (decision.rule, decision.remaining) == ("tenant", 0)
    denied = limiter.check(BOB)
    assert (denied.allowed, denied.rule, denied.retry_after) == (False, "user", 20.0)


def test_a_request_without_a_matching_rule_is_not_limited() -> None:
    """It is allowed without a rule, with more units remaining than a client can spend."""
    limiter = Limiter.from_rules("{version: 1,\n rules: []}")
    decision = limiter.check(ANN)
    assert (decision.allowed, decision.rule, decision.remaining) == (True, "", 10**9)


def test_each_rule_multiplies_the_cost_of_the_call(store: Store, clock: ManualClock) -> None:
    """Each rule charges its own cost, and refunds the same."""
    limiter = Limiter.from_rules(
        TWO_RULES.replace("3/minute", "30/minute, cost: {/search: 5}"), store=store, clock=clock
    )
    search = Request(user="ann", tenant="acme", endpoint="/search?q=1")
    assert limiter.check(search, cost=2)
    assert left(limiter.explain(ANN)) == [20, 3]
    limiter.refund(search, cost=1)
    assert left(limiter.explain(ANN)) == [25, 4]


def test_a_cost_that_can_never_fit_is_an_error(store: Store, clock: ManualClock) -> None:
    """A cost above the capacity of a rule raises at once, and no other rule is charged."""
    limiter = Limiter.from_rules(
        TWO_RULES.replace("3/minute", "3/minute, cost: 2"), store=store, clock=clock
    )
    with pytest.raises(CapacityError):
        limiter.check(ANN, cost=2)
    with pytest.raises(CapacityError):
        limiter.peek(ANN, cost=2)
    explained = limiter.explain(ANN, cost=2).rules
    assert "4" in explained[0].error
    assert left(limiter.explain(ANN)) == [3, 5]


# ------------------------------------------------------------------------------- lists, modes


def test_lists_take_precedence_over_rules() -> None:
    """Allowed without a limit, or denied for a year, which means never."""
    limiter = Limiter.from_rules(TWO_RULES + 'allow: ["user:ann"]\ndeny: ["user:bob"]\n')
    assert answers(limiter, *[ANN] * 10) == [True] * 10
    assert limiter.check(ANN).rule == "allow"
    denied = limiter.check(BOB)
    assert (denied.allowed, denied.rule, denied.retry_after_ns) == (False, "deny", DENIED_NS)
    assert limiter.peek(BOB) == denied
    assert limiter.counts() == {}


SHADOWED = """
version: 1
rules:
  - {id: tried, by: user, limits: 1/minute, mode: shadow}
  - {id: real, by: user, limits: 3/minute}
"""


def test_a_shadow_rule_counts_and_never_denies(store: Store, clock: ManualClock) -> None:
    """It is decided beside the enforced rule, and its would-be denials are counted."""
    limiter = Limiter.from_rules(SHADOWED, store=store, clock=clock)
    assert answers(limiter, *[ANN] * 4) == [True, True, True, False]
    counts = limiter.counts()
    assert (counts["tried"].allowed, counts["tried"].shadow_denied) == (1, 3)
    assert (counts["real"].allowed, counts["real"].denied) == (3, 1)
    assert limiter.check(BOB).rule == "real"


async def test_a_shadow_rule_on_asyncio(store: Store, clock: ManualClock) -> None:
    """On asyncio, it is called at the same time as the enforced rules."""
    limiter = AsyncLimiter.from_rules(SHADOWED, store=store, clock=clock)
    assert [bool(await limiter.check(ANN)) for _ in range(4)] == [True, True, True, False]
    counts = limiter.counts()
    assert (counts["tried"].allowed, counts["tried"].shadow_denied) == (1, 3)


def test_a_cost_above_the_capacity_of_a_shadow_rule_is_not_an_error() -> None:
    """It counts as a denial of the shadow rule."""
    limiter = Limiter.from_rules(SHADOWED)
    assert limiter.check(ANN, cost=2)
    assert limiter.counts()["tried"].shadow_denied == 1


def test_shadow_rules_alone_limit_nothing() -> None:
    """Without an enforced rule, a request is allowed and its decision names no rule."""
    limiter = Limiter.from_rules(SHADOWED.replace("3/minute", "3/minute, mode: shadow"))
    assert answers(limiter, *[ANN] * 9) == [True] * 9
    assert limiter.check(ANN).rule == ""


def test_rules_under_rollout_have_separate_states(store: Store, clock: ManualClock) -> None:
    """A subject that moves to the new rule has a fresh count there, and its old count on the way
    back."""
    document = """
version: 1
rules:
  - id: new
    by: user
    limits: [{limit: 3, per: 60, algorithm: sliding_window_log}]
    rollout: PER_CENT
  - {id: old, by: user, limits: 3/minute}
"""
    limiter = Limiter.from_rules(document.replace("PER_CENT", "0"), store=store, clock=clock)
    assert limiter.check(ANN).remaining == 2
    limiter.use(document.replace("PER_CENT", "100"))
    moved = limiter.check(ANN)
    assert (moved.rule, moved.remaining) == ("new", 2)
    limiter.use(document.replace("PER_CENT", "0"))
    back = limiter.check(ANN)
    assert (back.rule, back.remaining) == ("old", 1)


# ----------------------------------------------------------------------------------- overrides


def test_spent_units_survive_the_start_and_end_of_an_override(clock: ManualClock) -> None:
    """The override ends on time, and spent units carry over in both directions."""
    until = datetime.fromtimestamp(1_800_000_000 + 30, UTC).isoformat()
    limiter = Limiter.from_rules(
        "version: 1\nrules: [{id: user, by: user, limits: 3/hour}]\n"
        f"overrides: [{{for: {{user: ann}}, multiply: 10, until: {until}, reason: launch}}]",
        clock=clock,
    )
    assert limiter.check(ANN, cost=28).remaining == 2
    clock.advance(29.9)
    assert limiter.check(ANN).limit == 30
    clock.advance(0.1)
    assert not limiter.check(ANN)
    assert limiter.check(ANN).limit == 3
    assert limiter.check(BOB).limit == 3


def test_the_system_clock_ends_overrides() -> None:
    """An override that ends in the past does not apply; one that ends in the future does."""
    document = TWO_RULES + (
        "overrides:\n"
        "  - {for: {user: ann}, rule: user, limits: 77/minute, until: 2020-01-01T00:00:00Z}\n"
        "  - {for: {user: bob}, rule: user, limits: 88/minute, until: 2999-01-01T00:00:00Z}\n"
    )
    limiter = Limiter.from_rules(document)
    limits = [limiter.explain(each).rules[0].limits[0].limit for each in (ANN, BOB)]
    assert limits == [3, 88]


# -------------------------------------------------------------------------------- other verbs


def test_refund_grant_and_reset(store: Store, clock: ManualClock) -> None:
    """They apply to all rules that a request has to pass."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    assert answers(limiter, ANN, ANN, ANN, ANN) == [True, True, True, False]
    limiter.refund(ANN)
    assert answers(limiter, ANN, ANN) == [True, False]
    limiter.grant(ANN, 2)
    assert answers(limiter, ANN, ANN, ANN) == [True, True, False]
    limiter.reset(ANN)
    assert limiter.peek(ANN).remaining == 3
    assert left(limiter.explain(BOB)) == [3, 5]


async def test_refund_grant_and_reset_on_asyncio(store: Store, clock: ManualClock) -> None:
    """On asyncio, too, they apply to all rules."""
    limiter = AsyncLimiter.from_rules(TWO_RULES, store=store, clock=clock)

    async def allowed(times: int) -> list[bool]:
        return [bool(await limiter.check(ANN)) for _ in range(times)]

    assert await allowed(4) == [True, True, True, False]
    await limiter.refund(ANN)
    assert await allowed(2) == [True, False]
    await limiter.grant(ANN, 2)
    assert await allowed(3) == [True, True, False]
    await limiter.reset(ANN)
    assert (await limiter.peek(ANN)).remaining == 3


def test_wait_reserve_and_the_decorator(clock: ManualClock) -> None:
    """`wait`, `reserve` and the decorator accept a request."""
    limiter = Limiter.from_rules(TWO_RULES, clock=clock)

    @limiter.limit(key=lambda name: Request(user=name))
    def greet(name: str) -> str:
        return f"hello {name}"

    assert [greet("ann") for _ in range(3)] == ["hello ann"] * 3
    with pytest.raises(LimitExceeded):
        greet("ann")
    before_ns = clock.now_ns()
    assert limiter.wait(Request(user="ann"), timeout=60)
    assert clock.now_ns() - before_ns == 20 * 10**9
    with pytest.raises(RuntimeError), limiter.reserve(BOB):
        raise RuntimeError
    assert limiter.peek(BOB).remaining == 3
    with limiter.reserve(BOB) as reservation:
        assert reservation.decision.remaining == 2


async def test_wait_reserve_and_the_decorator_on_asyncio(clock: ManualClock) -> None:
    """They accept a request on asyncio, too."""
    limiter = AsyncLimiter.from_rules(TWO_RULES, clock=clock)

    @limiter.limit(key=lambda name: Request(user=name))
    async def greet(name: str) -> str:
        return f"hello {name}"

    assert [await greet("ann") for _ in range(3)] == ["hello ann"] * 3
    with pytest.raises(LimitExceeded):
        await greet("ann")
    assert await limiter.wait(Request(user="ann"), timeout=60)
    with pytest.raises(RuntimeError):
        async with limiter.reserve(BOB):
            raise RuntimeError
    assert (await limiter.peek(BOB)).remaining == 3


def test_limiting_off_applies_to_rules() -> None:
    """Rules are switched off like limits."""
    limiter = Limiter.from_rules(TWO_RULES)
    with limiting_off():
        assert answers(limiter, *[ANN] * 20) == [True] * 20
    assert limiter.peek(ANN).remaining == 3


@pytest.mark.parametrize("key", ["user:42", ("a", "b"), None, {"user": "42"}], ids=repr)
def test_rules_need_a_request(key: Any) -> None:
    """A key has no fields to match. The error shows a correct example."""
    limiter = Limiter.from_rules(TWO_RULES)
    for verb in (limiter.check, limiter.peek, limiter.reset, limiter.explain):
        with pytest.raises(ConfigError, match="a limiter with rules checks a Request"):
            verb(key)


@pytest.mark.parametrize("cost", [-1, 1.5, True, "1"], ids=repr)
def test_an_invalid_cost_is_rejected(cost: Any) -> None:
    """The fast path and the slow path reject it."""
    with pytest.raises(ConfigError, match="is not a whole number from 0 up"):
        Limiter.from_rules(TWO_RULES).check(ANN, cost)


# ------------------------------------------------------------------------------- swapping rules


def version(number: int) -> str:
    """Return a document with two rules whose ids and limits contain the version."""
    return f"""
version: 1
rules:
  - {{id: user-{number}, by: user, limits: {1_000_000 + number}/minute}}
  - {{id: tenant-{number}, by: tenant, limits: {2_000_000 + number}/minute}}
"""


def consistent(decision: Decision) -> bool:
    kind, _, number = decision.rule.partition("-")
    start = {"user": 1_000_000, "tenant": 2_000_000}[kind]
    return decision.allowed and decision.limit == start + int(number)


def test_a_hundred_documents_swapped_under_load() -> None:
    """No request is dropped, and every decision and plan belongs to exactly one version."""
    limiter = Limiter.from_rules(version(0))
    done = threading.Event()
    seen: list[set[str]] = [set() for _ in range(3)]
    wrong: list[object] = []

    def check(mine: set[str]) -> None:
        while not done.is_set():
            try:
                decision = limiter.check(ANN)
                rules = limiter.explain(ANN).rules
            except Exception as error:  # any error is a dropped request
                wrong.append(error)
                return
            versions = {rule.id.partition("-")[2] for rule in rules}
            if not consistent(decision) or len(versions) != 1 or len(rules) != 2:
                wrong.append((decision, rules))
                return
            mine.add(decision.rule)

    threads = [threading.Thread(target=check, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for number in range(1, 101):
        limiter.use(version(number), f"v{number}")
        name = f"user-{number}"
        while name not in limiter.counts() and not wrong:
            limiter.check(ANN)
        while number % 20 == 0 and not any(name in mine for mine in seen) and not wrong:
            done.wait(0.001)  # a thread meets at least every twentieth document
    done.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert limiter.check(ANN).rule == "user-100"
    assert limiter.explain(ANN).version == "v100"


async def test_a_document_swapped_during_a_check(clock: ManualClock) -> None:
    """A check in flight on a remote store keeps the rules that it started with."""
    server = running("single")
    server.flush()
    limiter = AsyncLimiter.from_rules(version(0), store=f"{server.uri}?deadline_ms=10000")
    for number in range(1, 21):
        tasks = [asyncio.create_task(limiter.check(ANN)) for _ in range(20)]
        await asyncio.sleep(0)
        limiter.use(version(number))
        assert all(consistent(each) for each in await asyncio.gather(*tasks))
    await limiter.close()


def test_json_on_one_line_is_a_document() -> None:
    """It is not read as a path, which would be too long for the system and for a message."""
    text = json.dumps({"version": 1, "rules": [{"id": "all", "by": "user", "limits": "2/minute"}]})
    with Limiter.from_rules(text) as limiter:
        assert limiter.check(ANN).remaining == 1
        limiter.use(text.replace("2/minute", "5/minute"))
        assert limiter.check(ANN).remaining == 3


def test_an_invalid_document_changes_nothing() -> None:
    """The old one stays in force, with its version and its counts."""
    limiter = Limiter.from_rules(TWO_RULES)
    limiter.use(TWO_RULES, "v1")
    limiter.check(ANN)
    for wrong in ("version: 1\nrules: [{id: x}]", "version: 2\n", {"version": 1, "rules": 5}):
        with pytest.raises(DocumentError):
            limiter.use(wrong)
    explained = limiter.explain(ANN)
    assert (explained.version, len(explained.applying)) == ("v1", 2)
    assert limiter.counts()["user"].allowed == 1


def test_counts_are_kept_for_rules_of_the_document() -> None:
    """Counts of removed rules are dropped; those of other rules continue."""
    limiter = Limiter.from_rules(TWO_RULES)
    limiter.check(ANN)
    limiter.use("version: 1\nrules: [{id: user, by: user, limits: 9/minute}]")
    assert {name: each.allowed for name, each in limiter.counts().items()} == {"user": 1}
    limiter.check(ANN)
    assert limiter.counts()["user"].allowed == 2


def test_raising_a_limit_keeps_spent_units(store: Store, clock: ManualClock) -> None:
    """The limits of the new document apply to the units that the old one admitted."""
    limiter = Limiter.from_rules(TWO_RULES, store=store, clock=clock)
    assert answers(limiter, ANN, ANN, ANN, ANN) == [True, True, True, False]
    limiter.use(TWO_RULES.replace("3/minute", "4/minute"))
    assert answers(limiter, ANN, ANN) == [True, False]


def test_a_change_of_an_entry_reaches_the_next_request() -> None:
    """Also one of a client that was checked before, and the entry outlives a new document."""
    rules = "version: 1\nrules: [{id: tenant, by: tenant, limits: 5/minute}]"
    limiter = Limiter.from_rules(rules, clock=ManualClock())
    request = Request(user="changed", tenant="acme")
    entries = EntryTable()
    assert limiter.evaluate(request).kind == "limited"
    for removed, kind in ((False, "blocked"), (True, "limited"), (False, "blocked")):
        entries.apply([EntryRow("deny", "user:changed", "", 1, removed)], 1)
        limiter.use_entries(entries)
        assert limiter.evaluate(request).kind == kind
    limiter.use(rules)
    assert limiter.evaluate(request).kind == "blocked"


# ── When the store cannot decide some of the rules ────────────────────────────────────────────────

SPENT_BY_BOTH = """
version: 1
rules:
  - {id: key, by: api_key, limits: 100/hour}
  - {id: ip, by: ip, limits: 50/hour}
"""


def fill(store: Store) -> None:
    """Check new keys until the store has no room for another."""
    counter = store.counter([Limit(1, per=3600)], "other")
    with suppress(StoreFull):
        for number in range(10_000):
            counter.check(str(number), 1)
    assert store.stats().refused


@pytest.mark.parametrize("kind", ["kernel", "python"])
async def test_a_full_table_does_not_switch_other_rules_off(kind: str) -> None:
    """Requests with made-up API keys pass as often as the limit of their address allows."""
    for limiter_type in (Limiter, AsyncLimiter):
        clock = ManualClock()
        store = open_store("memory://?capacity=64", clock)
        if kind == "python":
            store = PythonMemoryStore(clock, 64)
        limiter: Any = limiter_type.from_rules(SPENT_BY_BOTH, store=store, clock=clock)

        async def check(key: str, limiter: Any = limiter) -> Decision:
            answer = limiter.check(Request(ip="192.0.2.1", api_key=key))
            decision: Decision = await answer if isinstance(limiter, AsyncLimiter) else answer
            return decision

        assert (await check("real")).allowed
        fill(store)
        decisions = [await check(f"made up {number}") for number in range(200)]
        assert sum(each.allowed for each in decisions) == 49
        # An admission is marked, because one rule did not decide. A denial is exact.
        assert all(each.degraded is each.allowed for each in decisions)
        counts = limiter.counts()
        assert (counts["key"].failed, counts["ip"].failed) == (49, 0)
        assert (await check("real")).rule == "ip"


def partly_failing(policies: Sequence[str], limits: Sequence[int], more: str = "") -> Limiter:
    """Return a limiter with one rule for each policy, by fields of its own."""
    clock = ManualClock()
    fields = ("user", "tenant", "ip")
    lines = [
        f"  - {{id: {field}, by: {field}, limits: {limit}/hour"
        # "raise" is a policy of limiters only.
        + ("" if policy == "raise" else f", on_failure: {policy}")
        + more
        + "}"
        for field, policy, limit in zip(fields, policies, limits, strict=False)
    ]
    rules = "\n".join(["version: 1", "rules:", *lines])
    return Limiter.from_rules(rules, store=PartlyFailing(clock), clock=clock, on_failure="raise")


def fail(limiter: Limiter, *rules: str) -> None:
    store: Any = limiter.store
    store.failing = frozenset(rules)


ALL = Request(user="ann", tenant="acme", ip="192.0.2.1")


@pytest.mark.parametrize(
    ("policy", "allowed", "remaining"),
    [
        # The user's rule fails: requests 1 to 5, and what remains of the tenant's 3 units then.
        ("open", [True, True, True, False, False], 0),
        ("closed", [False] * 5, 3),
        ("local", [True, True, False, False, False], 1),
        ("raise", [None] * 5, 3),
    ],
)
def test_the_failure_policy_answers_for_its_own_rule_only(
    policy: str, allowed: list[bool | None], remaining: int
) -> None:
    """The tenant's rule is decided and charged, unless the policy of the user's rule denies."""
    limiter = partly_failing([policy, "open"], [2, 3])
    fail(limiter, "user")
    found: list[bool | None] = []
    for _ in range(5):
        try:
            result = limiter.evaluate(ALL)
        except StoreUnavailable:
            found.append(None)
            continue
        found.append(result.decision.allowed)
        # A denial of the tenant's rule is exact; everything else is marked.
        is_exact = result.decision.rule == "tenant" and not result.decision.allowed
        assert result.decision.degraded is not is_exact
        assert (result.kind == "unavailable") is (policy == "closed")
    assert found == allowed
    fail(limiter)
    explained = limiter.explain(ALL)
    assert [left(explained)[1], limiter.counts()["user"].failed] == [remaining, 5]
    assert "tenant" not in limiter.counts() or limiter.counts()["tenant"].failed == 0


def test_a_peek_applies_failure_policies_by_rule() -> None:
    """The other rule's quota is shown, marked degraded, and nothing is counted."""
    limiter = partly_failing(["open", "open"], [2, 3])
    fail(limiter, "user")
    peeked = limiter.peek(ALL)
    assert (peeked.allowed, peeked.rule, peeked.remaining, peeked.degraded) == (
        True,
        "tenant",
        3,
        True,
    )
    assert limiter.counts() == {}


@pytest.mark.parametrize(
    ("policy", "allowed", "remaining"),
    [("open", [True, True], 1), ("closed", [False, False], 3), ("local", [False, True], 3)],
)
def test_several_requests_apply_failure_policies_by_rule(
    policy: str, allowed: list[bool], remaining: int
) -> None:
    """One rule fails in a call of several requests: the other is charged for all, or not at all."""
    limiter = partly_failing([policy, "open"], [2, 3])
    bob = Request(user="bob", tenant="acme")
    fail(limiter, "user")
    if policy == "local":  # the local limit has no unit left for the first
        limiter.evaluate_all([(Request(user="ann", tenant="other"), 2)])
    found = limiter.evaluate_all([(ALL, 1), (bob, 1)])
    assert [each.decision.allowed for each in found] == allowed
    # A caller that settles a request has nothing to refund if nothing stayed charged.
    charged = [each.decision.charged_ns is not None for each in found]
    assert charged == [all(allowed)] * 2
    fail(limiter)
    assert left(limiter.explain(bob))[1] == remaining


def test_rules_with_penalties_fail_separately() -> None:
    """The cool-down of one rule cannot be read: that rule fails, and the other is charged."""
    limiter = partly_failing(["open", "open"], [2, 3], ", penalty: {after: 2, cooldown: 10s}")
    fail(limiter, "user")
    assert [bool(limiter.check(ALL)) for _ in range(6)] == [True] * 3 + [False] * 3
    assert [each.rule for each in limiter.penalties()] == ["tenant"]
    closed = partly_failing(["closed", "open"], [2, 3], ", penalty: {after: 2, cooldown: 10s}")
    fail(closed, "user")
    assert not closed.check(ALL)
    assert closed.evaluate(ALL).kind == "unavailable"
    fail(closed)
    assert left(closed.explain(ALL)) == [2, 3]


def test_shadow_rules_fail_separately() -> None:
    """The other shadow rules count, whichever enforced or shadow rule fails."""
    limiter = partly_failing(["open", "open, mode: shadow", "open, mode: shadow"], [2, 3, 4])
    fail(limiter, "user", "tenant")
    assert limiter.check(ALL).degraded
    counts = limiter.counts()
    assert [counts[rule].failed for rule in ("user", "tenant", "ip")] == [1, 1, 0]
    assert counts["ip"].allowed == 1


@given(
    policies=st.lists(st.sampled_from(["open", "closed", "local"]), min_size=2, max_size=3),
    failing=st.lists(st.sets(st.sampled_from(["user", "tenant", "ip"])), min_size=1, max_size=12),
    together=st.booleans(),
)
def test_a_working_rule_counts_exactly_the_requests_that_pass(
    policies: list[str], failing: list[set[str]], together: bool
) -> None:
    """Whatever else fails: it is charged for each admitted request and no other, and holds."""
    limits = [4, 3, 5]
    limiter = partly_failing(policies, limits)
    spent = dict.fromkeys(("user", "tenant", "ip")[: len(policies)], 0)
    for down in failing:
        fail(limiter, *down)
        results = limiter.evaluate_all([(ALL, 1)]) if together else [limiter.evaluate(ALL)]
        decision = results[0].decision
        working = [rule for rule in spent if rule not in down]
        if decision.allowed:
            for rule in working:
                spent[rule] += 1
        policy_of = dict(zip(spent, policies, strict=True))
        full = any(spent[rule] >= limit for rule, limit in zip(spent, limits, strict=False))
        if any(policy_of[rule] == "closed" for rule in spent if rule in down):
            assert not decision.allowed
        elif not full and all(policy_of[rule] == "open" for rule in spent if rule in down):
            assert decision.allowed
    fail(limiter)
    assert left(limiter.explain(ALL)) == [
        limit - used for limit, used in zip(limits, spent.values(), strict=False)
    ]
