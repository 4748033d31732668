"""A call with several groups of charges decides each of them as the reference does, in order."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from ratekeeper import CapacityError, Limit
from ratekeeper.core.model import Decision, decision_fields
from ratekeeper.decide.store import LocalCounter, StoreError
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.scripts import (
    RuleScripts,
    ScriptCall,
    ScriptCharge,
    batch_call,
    charge_replies,
)
from ratekeeper.testing import ManualClock
from tests.parity.in_microseconds import RESET, RETRY, up_to_us
from tests.parity.traces import random_limit
from tests.redis_servers import Single, running

pytestmark = pytest.mark.server

ALGORITHMS = ("token_bucket", "fixed_window", "sliding_window_counter", "sliding_window_log")
CONFIG = parse("redis://localhost")
SECOND_NS = 10**9


@pytest.fixture
def server() -> Single:
    """Return the shared server, without keys."""
    server = cast("Single", running("single"))
    server.flush()
    return server


def run(server: Single, call: ScriptCall) -> Any:
    """Run a call; an error of it is returned."""
    keys = (call.key, *call.more_keys)
    try:
        with server.client() as client:
            return client.eval(call.script.text, len(keys), *keys, *call.arguments)
    except ResponseError as error:
        return error


def shown(decision: Decision) -> list[Any]:
    """Return the fields of a decision, with waits of whole microseconds."""
    fields = list(decision_fields(decision))
    for wait in (RETRY, RESET):
        fields[wait] = up_to_us(fields[wait])
    return fields


def answers_on_redis(group: Sequence[ScriptCharge], replies: Sequence[Any]) -> Any:
    """Return the answers of a group, or the cost that can never fit."""
    charged = all(reply[0] >= 0 for reply in replies)
    answers: list[list[Any]] = []
    try:
        for charge, reply in zip(group, replies, strict=True):
            decoder = charge.scripts.decoder
            if charge.requests > 1:
                found = decoder.checks_in_turn(reply, charge.cost, charge.requests)
                answers += [shown(each) for each in found]
            else:
                read = decoder.check if charged else decoder.peek
                answers.append(shown(read(reply, charge.cost)))
    except CapacityError as error:
        return error.cost
    return answers


def answers_in_memory(
    store: PythonMemoryStore, counters: Sequence[LocalCounter], group: Sequence[ScriptCharge]
) -> Any:
    """Decide a group in the reference; its charges are in the order of the counters."""
    try:
        if group[0].requests > 1:
            [counter] = counters
            found: list[Any] = [
                counter.check(group[0].subject, group[0].cost) for _ in range(group[0].requests)
            ]
        else:
            found = store.check_together(
                [(c, each.subject, each.cost) for c, each in zip(counters, group, strict=True)]
            )
    except CapacityError as error:
        return error.cost
    assert not any(isinstance(each, StoreError) for each in found)
    return [shown(each) for each in found]


def charge(random: Random, scripts: RuleScripts, requests: int) -> ScriptCharge:
    cost = random.randint(0 if requests == 1 else 1, 4)
    return ScriptCharge(scripts, random.choice("xy"), cost, requests=requests)


def alike(group: Sequence[ScriptCharge]) -> bool:
    """Return True if charges of a group have counts in common."""
    return len({(each.subject, each.scripts.field) for each in group}) < len(group)


@pytest.mark.parametrize("seed", range(40))
def test_groups_are_decided_in_order_as_by_the_reference(server: Single, seed: int) -> None:
    """Charges of one group on the same counts see one another; a denied group charges nothing."""
    random = Random(seed)
    clock = ManualClock(start=1_700_000_000)
    store = PythonMemoryStore(clock)
    rules: list[tuple[RuleScripts, LocalCounter]] = []
    algorithms = random.choice((ALGORITHMS, ALGORITHMS[:3]))
    for number in range(3):
        names = [f"{at}" for at in range(random.choice((1, 1, 2, 3)))]
        limits = tuple(
            Limit(random.randint(1, 12), random.choice((1, 7)), algorithm=each, name=name)  # type: ignore[arg-type]  # of the names
            if random.random() < 0.8
            else random_limit(random, each, name)  # type: ignore[arg-type]  # of the names
            for name in names
            for each in [random.choice(algorithms)]
        )
        for some in (limits, limits[-1:]):  # two counters with common counts
            scripts = RuleScripts(some, f"rule-{number}", CONFIG, clock)
            rules.append((scripts, store.counter(some, f"rule-{number}")))
    for _ in range(30):
        clock.advance_ns(random.choice((0, 1_000, 333_333_000, SECOND_NS, 9 * SECOND_NS)))
        if random.random() < 0.3:
            scripts, counter = random.choice(rules)
            units, ttl_ns = random.randint(1, 9), random.choice((None, SECOND_NS))
            assert run(server, scripts.grant("x", units, ttl_ns))
            counter.grant("x", units, ttl_ns)
        groups: list[list[ScriptCharge]] = []
        counters: list[list[LocalCounter]] = []
        for _ in range(random.randint(1, 6)):
            drawn = [random.choice(rules) for _ in range(random.choice((1, 1, 2, 3)))]
            count = random.choice((1, 2, 5, 30)) if len(drawn) == 1 else 1
            lowest = 0 if count == 1 else 1
            groups.append(
                [
                    ScriptCharge(
                        each, random.choice("xy"), random.randint(lowest, 4), requests=count
                    )
                    for each, _ in drawn
                ]
            )
            counters.append([counter for _, counter in drawn])
        call = batch_call(groups, rules[0][0].now()[0], spend=True)
        replies = iter(charge_replies(run(server, call), sum(map(len, groups))))
        for group, of_group in zip(groups, counters, strict=True):
            got = answers_on_redis(group, [next(replies) for _ in group])
            wanted = answers_in_memory(store, of_group, group)
            if alike(group) and isinstance(got, list) and not all(each[0] for each in got):
                # The later ones were decided as if the earlier ones were charged.
                got, wanted = ([each[0] for each in answers] for answers in (got, wanted))
            assert got == wanted
    for scripts, counter in rules:
        for subject in "xy":
            [reply] = charge_replies(run(server, scripts.peek(subject, 0, scripts.now()[0])), 1)
            left = scripts.decoder.peek(cast("list[int]", reply), 0)
            assert shown(left) == shown(counter.peek(subject, 0))


def minute(units: int, rule: str = "rule") -> RuleScripts:
    """Return the scripts of one limit a minute, on the server's clock."""
    return RuleScripts((Limit(units, per=60),), rule, CONFIG, ManualClock())


def test_an_error_is_the_reply_of_its_charge_alone(server: Single) -> None:
    """Its group is not charged, unless it is optional; other groups go on."""
    scripts = minute(10)
    server.admin.set(scripts.key("text"), "of another program")
    good, bad = ScriptCharge(scripts, "good", 1), ScriptCharge(scripts, "text", 1)
    groups = [[good], [bad], [good, bad], [good, bad._replace(optional=True)], [good]]
    call = batch_call(groups, 10**15, spend=True)
    replies = charge_replies(run(server, call), 7)
    assert [isinstance(each, ResponseError) for each in replies] == [0, 1, 0, 1, 0, 1, 0]
    used = [cast("list[int]", each)[2] for each in replies if isinstance(each, list)]
    assert used == [0, 1_000_000, 1_000_000, 2_000_000]
    alone = run(server, batch_call([[bad]], 10**15, spend=True))
    assert "WRONGTYPE" in str(charge_replies(alone, 1)[0])


def test_a_look_charges_nothing(server: Single) -> None:
    """Each group is decided as if it came first, and its charges see one another."""
    two = ScriptCharge(minute(3), "subject", 2)
    call = batch_call([[two], [two], [two, two]], 10**15, spend=False)
    replies = cast("list[list[int]]", run(server, call))
    assert [each[0] >= 0 for each in replies] == [True, True, True, False]
    assert server.admin.keys() == []
