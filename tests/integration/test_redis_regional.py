"""Global limits on a real Redis: damaged states, leaders, bounds, and what operators see."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator
from contextlib import closing
from fractions import Fraction
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

import pytest

from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.model import Limit, Limits
from ratekeeper.decide.regional import (
    Accepted,
    AcrossRegions,
    Report,
    Shares,
    SubjectKey,
    rule_number,
)
from ratekeeper.decide.stores.redis.audit import audit
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.regional import RedisRegional
from ratekeeper.decide.stores.redis.scripts import REGIONAL_LEARN
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.regions.table import EPOCH_MAX
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringCounter, answer
from tests.conformance.stores import PATIENCE
from tests.redis_servers import Cluster, Single, User, running

pytestmark = pytest.mark.server
T = TypeVar("T")

LIMITS: Limits = (Limit(100, per=60), Limit(1_000, per=3_600, algorithm="sliding_window_counter"))
HALF = Fraction(1, 2)
SHARES = Shares(1, HALF, HALF, 0, ("us",))
_numbers = count()


def awaited(call: Coroutine[Any, Any, T]) -> T:
    """Run one call of a sync."""
    return asyncio.run(call)


def opened(uri: str, clock: ManualClock | None = None, prefix: str = "") -> RedisStore:
    """Return a store with its own prefix."""
    options = "&".join(f"{name}={value}" for name, value in PATIENCE.items())
    joint = "&" if "?" in uri else "?"
    prefix = prefix or f"g{next(_numbers)}"
    return RedisStore(parse(f"{uri}{joint}{options}&prefix={prefix}"), clock)


@pytest.fixture
def server() -> Single:
    return cast("Single", running("single"))


@pytest.fixture
def raw(server: Single) -> Iterator[Any]:
    """A client whose replies are bytes."""
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def store(server: Single) -> Iterator[RedisStore]:
    found = opened(server.uri)
    lead(found.regional)
    yield found
    found.close()


def lead(regional: RedisRegional, name: str = "leader", shares: Shares = SHARES) -> int:
    """Take the lead and set the shares; return the token."""

    async def calls() -> int:
        leader, token = await regional.lead(name, 10**12)
        assert leader == name
        assert await regional.set_shares(shares, token)
        return token

    return awaited(calls())


def key_of(store: RedisStore, subject: str, rule: str = "api") -> bytes:
    """Return the key of a subject's state."""
    key = SubjectKey(rule_number(LIMITS, rule), subject)
    return f"{store.config.prefix}:{{%r{key.group}}}:{key.rule}:{subject}".encode()


def packed(raw: Any, lua: str) -> bytes:
    """Return msgpack of a value in Lua."""
    return cast("bytes", raw.eval(f"return cmsgpack.pack({lua})", 0))


# ── Damaged states ─────────────────────────────────────────────────────────────────────────────


def damaged(raw: Any, whole: bytes) -> list[bytes]:
    """Return values that no script has written."""
    random = Random(1)
    found = [b"", b"x", b"\xdc\x00\x10", random.randbytes(200), whole[:-9], whole + b"\x01"]
    found += [packed(raw, each) for each in ("1", "'text'", "{}", "{1}", "{2, 3}", "{9}")]
    found += [whole[:place] for place in (1, 14, 16, 40, 90, 130)]  # cut short
    for _ in range(40):
        place = random.randrange(len(whole))
        found.append(whole[:place] + random.randbytes(1) + whole[place + 1 :])
    return found


def test_a_damaged_state_fails_its_own_checks_only(raw: Any, store: RedisStore) -> None:
    """Whatever bytes are there, a check decides or raises StoreError, and a reset repairs it."""
    regional = store.regional
    counter = AnsweringCounter(regional.global_counter(LIMITS, "api", "exact"))
    counter.check("ann", 1)
    key, bob = key_of(store, "ann"), SubjectKey(rule_number(LIMITS, "api"), "ann")
    whole = raw.get(key)
    report = Report(bob, LIMITS, "exact", 1, 5, (0, 0), (5_000_000, 5_000_000), 0, 5, 10**18)

    async def sync() -> None:
        await regional.due(100, 1)
        await regional.learn("us", 1, [report])
        await regional.accept(1, [Accepted(bob, 1, 1, (0, 0))], 1)

    failed = 0
    for value in damaged(raw, whole):
        raw.set(key, value)
        for call in (counter.check, counter.peek, counter.grant):
            try:
                call("ann", 1, None) if call == counter.grant else call("ann", 1)  # type: ignore[call-arg]  # of each
            except StoreError:
                failed += 1
        awaited(sync())
        counter.reset("ann")
        try:
            counter.check("ann", 1)
        except StoreError as error:
            pytest.fail(f"{value!r}: {error}")
    assert failed > 30


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"\x07x", "its layout has the version 7 and this library knows 2"),
        (b"\x92\x01\xa1x", "it is not a state of Ratekeeper"),
    ],
)
def test_an_unreadable_state_is_named(raw: Any, store: RedisStore, value: bytes, why: str) -> None:
    """The error names the key, says what is wrong with it, and what to do. Nothing is written."""
    counter = AnsweringCounter(store.regional.global_counter(LIMITS, "api", "eventual"))
    raw.set(key_of(store, "ann"), value)
    with pytest.raises(StoreUnavailable, match=f"ann.*{why}.*reset the subject"):
        counter.check("ann", 1)
    assert raw.get(key_of(store, "ann")) == value
    counter.reset("ann")
    assert counter.check("ann", 1).allowed


def test_a_key_of_another_type_is_not_overwritten(raw: Any, store: RedisStore) -> None:
    """Another program's list under the name of a state fails the checks of that subject."""
    counter = AnsweringCounter(store.regional.global_counter(LIMITS, "api", "exact"))
    raw.rpush(key_of(store, "ann"), "x")
    with pytest.raises(StoreUnavailable, match="it is not a state"):
        counter.check("ann", 1)
    assert counter.check("bob", 1).allowed
    counter.reset("ann")
    assert counter.check("ann", 1).allowed


def test_one_damaged_state_does_not_hold_up_the_reports_of_others(
    raw: Any, store: RedisStore
) -> None:
    """The sync drops a subject that it cannot report, and goes on with the others."""
    counter = AnsweringCounter(store.regional.global_counter(LIMITS, "api", "exact"))
    subjects = [f"user{number}" for number in range(200)]  # several in each group
    for subject in subjects:
        counter.check(subject, 1)
    raw.set(key_of(store, "user7"), b"x")
    token = lead(store.regional)
    reports = awaited(store.regional.due(1_000, token))
    assert {each.key.subject for each in reports} == {*subjects} - {"user7"}
    assert awaited(store.regional.backlog()) == 199
    answers = awaited(store.regional.learn("us", 1, reports))
    assert all(each.accepted for each in answers)


# ── Leaders ────────────────────────────────────────────────────────────────────────────────────


def test_an_old_leader_does_nothing(store: RedisStore, server: Single) -> None:
    """From the moment at which another leads, `due`, `accept` and `set_shares` do nothing."""
    regional = store.regional
    counter = AnsweringCounter(regional.global_counter(LIMITS, "api", "exact"))
    counter.check("ann", 3)
    old = lead(regional)
    (report,) = awaited(regional.due(10, old))
    awaited(regional.step_down("leader"))
    other = opened(server.uri, prefix=store.config.prefix)
    leader, new = awaited(other.regional.lead("other", 10**12))
    assert (leader, new) == ("other", old + 1)
    counter.check("bob", 1)
    assert awaited(regional.due(10, old)) == []
    assert not awaited(regional.set_shares(SHARES._replace(epoch=2), old))
    assert awaited(regional.shares()) == SHARES
    accepted = Accepted(report.key, report.generation, report.total, report.returned)
    awaited(regional.accept(1, [accepted], old))
    assert awaited(regional.usage(LIMITS, "api", "ann")).unaccepted == (3, 3)
    awaited(other.regional.accept(1, [accepted], new))
    assert awaited(regional.usage(LIMITS, "api", "ann")).unaccepted == (0, 0)
    other.close()


def test_the_highest_epochs_are_told_apart(store: RedisStore) -> None:
    """The numbers of a script are exact up to 2**53, also after they were stored."""
    regional = store.regional
    counter = AnsweringCounter(regional.global_counter(LIMITS, "api", "exact"))
    token = lead(regional)
    last = SHARES._replace(epoch=EPOCH_MAX)
    assert awaited(regional.set_shares(last, token))
    assert awaited(regional.shares()) == last
    counter.check("ann", 3)
    (report,) = awaited(regional.due(10, token))
    accepted = Accepted(report.key, report.generation, report.total, report.returned)
    for epoch, left in ((EPOCH_MAX - 1, 3), (EPOCH_MAX, 0)):
        (learnt,) = awaited(regional.learn("us", epoch, [report]))
        assert learnt.accepted == (epoch == EPOCH_MAX)
        awaited(regional.accept(epoch, [accepted], token))
        assert awaited(regional.usage(LIMITS, "api", "ann")).unaccepted == (left, left)


def test_tokens_go_on_if_the_key_of_the_leader_is_lost(store: RedisStore, raw: Any) -> None:
    """A leader that would begin with the first token again could change nothing."""
    for name in ("a", "b", "c"):
        awaited(store.regional.step_down("leader"))
        lead(store.regional, name)
        awaited(store.regional.step_down(name))
    raw.delete(f"{store.config.prefix}:{{%r}}:leader")
    assert lead(store.regional, "d") > 4


def test_a_leader_repairs_damaged_shares(store: RedisStore, raw: Any) -> None:
    """Checks of the group fail until the leader sets the shares again."""
    counter = AnsweringCounter(store.regional.global_counter(LIMITS, "api", "exact"))
    group = SubjectKey(rule_number(LIMITS, "api"), "ann").group
    for value in (b"x", b"", packed(raw, "{1}"), packed(raw, "7")):
        raw.set(f"{store.config.prefix}:{{%r{group}}}:shares", value)
        with pytest.raises(StoreUnavailable):
            counter.check("ann", 1)
        assert awaited(store.regional.shares()) is None
        raw.set(f"{store.config.prefix}:{{%r}}:leader", value)
        lead(store.regional)
        assert counter.check("ann", 1).allowed


def test_without_shares_a_check_says_what_is_missing(server: Single) -> None:
    """A region whose sync has never run decides nothing."""
    with closing(opened(server.uri)) as store:
        counter = AnsweringCounter(store.regional.global_counter(LIMITS, "api", "exact"))
        with pytest.raises(StoreUnavailable, match="this region has no share"):
            counter.check("ann", 1)
        assert awaited(store.regional.shares()) is None
        counter.refund("ann", 1, None)
        counter.reset("ann")


# ── The cost of a check ────────────────────────────────────────────────────────────────────────


def commands(raw: Any) -> dict[str, int]:
    """Return how often each command has run on the server."""
    stats = raw.info("commandstats")
    return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}


@pytest.mark.parametrize("across", ["exact", "eventual"])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_check_runs_three_commands(
    raw: Any, store: RedisStore, across: AcrossRegions, allowed: bool
) -> None:
    """It reads the clock, the shares with the state, and writes; the first one notes it as due."""
    limits = (Limit(1_000 if allowed else 2, per=3_600),)
    counter = AnsweringCounter(store.regional.global_counter(limits, "api", across))
    counter.check("ann", 1)
    if not allowed:
        counter.check("ann", 1)
    before = commands(raw)
    for _ in range(20):
        assert counter.check("ann", 1).allowed is allowed
    ran = {name: count - before.get(name, 0) for name, count in commands(raw).items()}
    names = ("time", "get", "mget", "set", "setrange")
    found = {name: ran.get(name, 0) for name in names}
    # If the checks take more than a second, a subject is noted as due once more, by a whole write.
    assert ran.get("zadd", 0) <= 1
    if not allowed and across == "eventual":  # a denial writes the demand only
        assert found["setrange"] >= 19
        found = {**found, "set": found["set"] + found["setrange"], "setrange": 0}
    writes = 20 if allowed or across == "eventual" else 0
    assert found == {"time": 20, "get": 0, "mget": 20, "set": writes, "setrange": 0}


def test_a_subject_is_due_again_after_its_report(store: RedisStore) -> None:
    """Units that are admitted after a report do not wait until it is repeated."""
    counter = AnsweringCounter(store.regional.global_counter(LIMITS, "api", "exact"))
    token = lead(store.regional)
    for total in (1, 2, 3):
        counter.check("ann", 1)
        (report,) = awaited(store.regional.due(10, token))
        assert report.total == total
    assert awaited(store.regional.due(10, token)) == []


def test_a_lost_set_of_due_subjects_is_made_again(raw: Any) -> None:
    """A server without memory may evict it. A second later, checks note their subjects again."""
    clock = ManualClock(1_800_000_000)
    with closing(opened(running("single").uri, clock)) as timed:
        token = lead(timed.regional)
        counter = AnsweringCounter(timed.regional.global_counter(LIMITS, "api", "exact"))
        counter.check("ann", 1)
        raw.delete(key_of(timed, "ann").partition(b"}:")[0] + b"}:due")
        counter.check("ann", 1)
        assert awaited(timed.regional.due(10, token)) == []
        clock.advance(1)
        counter.check("ann", 1)
        (report,) = awaited(timed.regional.due(10, token))
    assert report.total == 3


def test_the_expiry_is_set_when_the_levels_need_it(raw: Any, store: RedisStore) -> None:
    """A state never expires before its levels are empty, though most checks leave its expiry."""
    counter = AnsweringCounter(store.regional.global_counter(LIMITS[:1], "api", "eventual"))
    key = SubjectKey(rule_number(LIMITS[:1], "api"), "ann")
    name = f"{store.config.prefix}:{{%r{key.group}}}:{key.rule}:ann"
    counter.check("ann", 1)
    first = raw.pttl(name)
    counter.check("ann", 1)
    assert 70_000 < raw.pttl(name) <= first < 80_000
    counter.check("ann", 98)
    assert 120_000 < raw.pttl(name) < 150_000


# ── Bounds ─────────────────────────────────────────────────────────────────────────────────────


def test_a_state_knows_sixteen_regions_at_most() -> None:
    """Names of regions come from other machines. The one that was silent longest makes room."""
    clock = ManualClock(1_800_000_000)
    with closing(opened(running("single").uri, clock)) as timed:
        lead(timed.regional)
        key = SubjectKey(rule_number(LIMITS, "api"), "ann")
        for number in range(20):
            report = Report(
                key, LIMITS, "eventual", 1, 1, (0, 0), (10**6, 10**6), 1, 1, clock.now_ns()
            )
            awaited(timed.regional.learn(f"region-{number}", 1, [report]))
            clock.advance(0.001)
        parts = awaited(timed.regional.usage(LIMITS, "api", "ann")).parts
    assert {each.region for each in parts} == {"", *(f"region-{n}" for n in range(4, 20))}


def test_states_expire_and_are_forgotten(raw: Any, store: RedisStore) -> None:
    """A client with many subjects leaves nothing behind: neither states nor members of `due`."""
    limits = (Limit(10, per=0.001),)
    counter = AnsweringCounter(store.regional.global_counter(limits, "short", "exact"))
    for number in range(100):
        counter.check(f"user{number}", 1)
    keys = list(raw.scan_iter(f"{store.config.prefix}:{{%r*:{rule_number(limits, 'short')}:*"))
    assert len(keys) == 100
    assert all(9_000 < raw.pttl(key) <= 12_000 for key in keys)
    raw.delete(*keys)  # as if they had expired
    token = lead(store.regional)
    assert awaited(store.regional.due(1_000, token)) == []
    assert awaited(store.regional.backlog()) == 0


def test_a_call_without_reports_connects_to_every_server_of_a_cluster() -> None:
    """So the first reports to another region wait neither for a connection nor for the script."""
    cluster = cast("Cluster", running("cluster"))
    primaries = [node.client() for node in cluster.primaries()]
    for node in primaries:
        node.script_flush()

    async def calls() -> None:
        await store.regional.notes()
        assert await store.regional.learn("us", 1, ()) == []

    with closing(opened(cluster.uri)) as store:
        awaited(calls())
    known = [node.script_exists(REGIONAL_LEARN.sha.decode()) for node in primaries]
    assert known == [[True]] * 3


def test_notes_are_bounded(store: RedisStore) -> None:
    """A region keeps 64 short texts."""

    async def write() -> dict[str, str]:
        for number in range(64):
            await store.regional.note(str(number), "x")
        await store.regional.note("7", "ä")
        with pytest.raises(StoreUnavailable, match="64 notes"):
            await store.regional.note("more", "x")
        with pytest.raises(ValueError, match="65536 bytes"):
            await store.regional.note("7", "x" * 65_537)
        return await store.regional.notes()

    found = awaited(write())
    assert (len(found), found["7"]) == (64, "ä")


# ── What operators see ─────────────────────────────────────────────────────────────────────────


def test_stats_and_audits_know_the_keys(server: Single, store: RedisStore, raw: Any) -> None:
    """States are counted by limit, no key is another program's, and wrong types are found."""
    server.flush()  # a server with many keys estimates
    lead(store.regional)
    counter = AnsweringCounter(store.regional.global_counter(LIMITS, "api", "exact"))
    answer(store.counter(LIMITS, "api").check("ann", 1))
    # A subject like the end of a key of the other kind.
    for subject in ("ann", "bob:{x}", "}"):
        counter.check(subject, 1)
    awaited(store.regional.note("a", "b"))
    assert store.stats().states == 2 + 3 * 2

    def defects() -> list[tuple[str, bytes]]:
        (found,) = audit(store._servers.topology, store.config.prefix, pause_seconds=0)
        return [(each.kind, each.key) for each in found.defects]

    assert defects() == []
    head = f"{store.config.prefix}:{{%r1}}:".encode()
    raw.set(head + b"other", "x")
    raw.delete(head + b"due")
    raw.set(head + b"due", "x")
    raw.persist(key_of(store, "bob:{x}"))
    assert sorted(defects()) == [
        ("no expiry", key_of(store, "bob:{x}")),
        ("not ours", head + b"other"),
        ("wrong type", head + b"due"),
    ]


def test_the_documented_permissions_are_enough() -> None:
    """Every call works for the user of the checklist in docs/redis.md."""
    text = (Path(__file__).parents[2] / "docs/redis.md").read_text(encoding="utf-8")
    found = re.search(r"ACL SETUSER ratekeeper on >secret (~rk:\* [^`]+)`", text)
    assert found is not None
    with (
        Single(password="root", users=[User("ratekeeper", "pw", found[1])]) as server,
        closing(opened(server.uri, prefix="rk")) as store,
    ):
        regional = store.regional
        token = lead(regional)
        counter = AnsweringCounter(regional.global_counter(LIMITS, "api", "eventual"))
        decision = counter.check("ann", 2)
        assert not counter.check("ann", 100).allowed
        counter.refund("ann", 1, decision.charged_ns)
        counter.grant("ann", 1, None)
        counter.peek("ann", 1)

        async def sync() -> None:
            (report,) = await regional.due(10, token)
            await regional.learn("us", 1, [report])
            accepted = Accepted(report.key, report.generation, report.total, report.returned)
            await regional.accept(1, [accepted], token)
            await regional.note("a", "b")
            await regional.notes()
            await regional.usage(LIMITS, "api", "ann")
            await regional.backlog()
            await regional.shares()
            await regional.now_ns()
            await regional.step_down("leader")

        awaited(sync())
        server.admin.set(key_of(store, "ann"), "x")
        counter.reset("ann")
        assert store.stats().states == 0
