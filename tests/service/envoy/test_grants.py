"""Finite grants: never a unit more than was charged, and no refund of a unit that can be spent."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import Limit
from ratekeeper.core.steps import run
from ratekeeper.service.envoy import grants
from ratekeeper.service.envoy.grants import (
    GRANTS_MAX,
    LIFETIME_NS,
    NO_UNITS,
    TTL_S,
    Grant,
    GrantLedger,
    Refund,
    charging,
    grant_of,
    size_of,
)
from ratekeeper.service.envoy.shares import DELIVERY_NS, SEND_NS_MAX

MS: Final = NS_PER_SECOND // 1_000
REPORT_NS: Final = 5 * NS_PER_SECOND
ACTIONS: Final = (
    *("go on", "spend", "spend", "spend all", "demand", "idle"),
    *("stop", "lose report", "repeat report", "break", "restart", "late", "no room"),
)
Event = tuple[int, str, int]


class Overspent(AssertionError):
    """The Envoy may admit more than was charged."""


# What the model's limits have left, and the Envoys that share them.
ROOM = 200
ENVOYS = 2


class Model:
    """One Envoy with one bucket, and the worker that has its stream."""

    def __init__(self) -> None:
        self.now_ns = 10**15
        self.charged = self.refunded = self.admitted = 0
        self.tokens = 0
        self.ends_ns = 0
        self.counts = [0, 0]
        self.report_ns = self.now_ns
        self.stopped_ns = 0
        self.delay_ns = MS
        self.room = True
        self.loses = self.repeats = False
        self.ledger: GrantLedger | None = None
        self.messages: list[tuple[int, Grant]] = []
        self.demand = 0

    def run(self, events: list[Event]) -> None:
        """Let things happen. Raises Overspent."""
        for wait_ms, action, number in events:
            for _ in range(wait_ms // 100 + 1):
                self.pass_time(min(wait_ms, 100) * MS)
            self.act(action, number)
            self.check()

    def pass_time(self, wait_ns: int) -> None:
        """Let a short time pass. An Envoy that was stopped reports and admits before it reads."""
        was_stopped = self.now_ns < self.stopped_ns
        self.now_ns += wait_ns
        if self.now_ns >= self.stopped_ns:
            if self.now_ns >= self.report_ns:
                self.report_ns = self.now_ns + REPORT_NS
                self.report()
            while self.messages and self.messages[0][0] <= self.now_ns and not was_stopped:
                grant = self.messages.pop(0)[1]
                self.tokens, self.ends_ns = grant.units, self.now_ns + grant.ttl_s * NS_PER_SECOND
            self.spend(self.demand * wait_ns // NS_PER_SECOND)
        if self.ledger is not None:
            self.top_up(self.ledger)
        self.check()

    def spend(self, requests: int) -> None:
        """Admit requests while there are tokens."""
        if self.now_ns < self.stopped_ns:
            return
        spent = min(requests, self.tokens) if self.now_ns < self.ends_ns else 0
        self.tokens -= spent
        self.admitted += spent
        self.counts[0] += spent
        self.counts[1] += requests - spent

    def report(self) -> None:
        """Report to the worker; without a stream, open one, and lose the counts."""
        counts, self.counts = self.counts, [0, 0]
        if self.ledger is None:
            self.ledger = GrantLedger(self.now_ns)
            return
        if self.loses:
            self.loses = False
            return
        for _ in range(2 if self.repeats else 1):
            refunds = self.ledger.reported(*counts, self.now_ns)
            self.refunded += sum(each.units for each in refunds)
        self.repeats = False

    def top_up(self, ledger: GrantLedger) -> None:
        """Charge and send a grant, if one is due."""
        if not ledger.is_due(self.now_ns):
            return
        grant = NO_UNITS
        if self.room:
            grant = Grant(size_of(ledger.wanted, ROOM, ENVOYS), TTL_S, 0)
            self.charged += grant.units
        elif not ledger.denied(self.now_ns):
            return
        ledger.sending(grant)
        ledger.sent(self.now_ns)
        arrives_ns = max([self.now_ns + self.delay_ns, *(at for at, _ in self.messages)])
        self.messages.append((arrives_ns, grant))

    def act(self, action: str, number: int) -> None:
        """Let one thing happen."""
        match action:
            case "spend":
                self.spend(number // 8)
            case "spend all":
                self.spend(10**6)
            case "demand" | "idle":
                self.demand = number if action == "demand" else 0
            case "stop":
                self.stopped_ns = self.now_ns + number * NS_PER_SECOND // 16
            case "lose report":
                self.loses = True
            case "repeat report":
                self.repeats = True
            case "break" | "restart":
                self.ledger = None
                if number % 2 or action == "restart":
                    self.messages.clear()
                if action == "restart":
                    self.tokens = 0
            case "late":
                self.delay_ns = DELIVERY_NS * number // 256
            case "no room":
                self.room = not self.room

    def check(self) -> None:
        """Raise Overspent if tokens are left that were not charged, or were refunded."""
        coming = sum(grant.units for _, grant in self.messages)
        usable = self.tokens if self.now_ns < self.ends_ns else 0
        if self.admitted + usable + coming > self.charged - self.refunded:
            raise Overspent(f"{vars(self)}")


events = st.lists(
    st.tuples(
        st.sampled_from([0, 10, 100, 400, 1_000, 3_000, 6_000]),
        st.sampled_from(ACTIONS),
        st.integers(0, 255),
    ),
    max_size=60,
)


def random_events(random: Random, count: int) -> list[Event]:
    return [
        (
            random.choice((0, 10, 100, 400, 1_000, 4_000)),
            random.choice(ACTIONS[:6] if random.random() < 0.7 else ACTIONS),
            random.randrange(256),
        )
        for _ in range(count)
    ]


@given(events)
def test_an_envoy_never_admits_more_than_was_charged(events: list[Event]) -> None:
    """Nor can it, with the tokens that it has: whatever is lost, late, repeated or restarted."""
    Model().run(events)


@pytest.mark.parametrize("per_second", [10, 40, 100])
def test_unspent_units_come_back(per_second: int) -> None:
    """Of a steady demand little is outstanding, and when it ends, two of the least grants are."""
    model = Model()
    model.demand = per_second
    model.run([(1_000, "go on", 0)] * 120)
    outstanding = model.charged - model.refunded - model.admitted
    assert outstanding <= 5 * per_second
    model.demand = 0
    model.run([(1_000, "go on", 0)] * 30)
    least = size_of(1, ROOM, ENVOYS)
    assert model.charged - model.refunded - model.admitted <= 2 * least
    assert model.refunded > 0


def settles_with_one_report(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grants, "REPORTS", 1)


def ignores_missing_reports(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grants, "REPORT_NS_MAX", 10**18)


def refunds_the_grant_in_use(patch: pytest.MonkeyPatch) -> None:
    reported = GrantLedger.reported

    def hasty(self: GrantLedger, allowed: int, denied: int, now_ns: int) -> list[Refund]:
        refunds = reported(self, allowed, denied, now_ns)
        if len(self._grants) > 1:
            refunds.append(self._left(self._grants.pop(0).grant))
        return refunds

    patch.setattr(GrantLedger, "reported", hasty)


def refunds_when_a_stream_ends(patch: pytest.MonkeyPatch) -> None:
    act = Model.act

    def ending(self: Model, action: str, number: int) -> None:
        if action == "break" and self.ledger is not None:
            self.refunded += sum(each.grant.units for each in self.ledger._grants)
        act(self, action, number)

    patch.setattr(Model, "act", ending)


@pytest.mark.parametrize(
    "plant",
    [
        settles_with_one_report,
        ignores_missing_reports,
        refunds_the_grant_in_use,
        refunds_when_a_stream_ends,
    ],
)
def test_the_model_finds_a_wrong_variant(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them lets an Envoy spend units that were refunded."""
    plant(monkeypatch)
    with pytest.raises(Overspent):
        many_runs()


def many_runs() -> None:
    for seed in range(400):
        Model().run(random_events(Random(seed), 60))


# ── Settling ───────────────────────────────────────────────────────────────────────────────────


def ledger_with(*granted: Grant) -> GrantLedger:
    """Return a ledger whose grants were sent at 0 s, 5 s, 10 s and so on, with no report yet."""
    ledger = GrantLedger(0)
    for number, grant in enumerate(granted):
        send(ledger, grant, number * REPORT_NS)
        ledger._reported_ns = number * REPORT_NS
    return ledger


def send(ledger: GrantLedger, grant: Grant, now_ns: int) -> None:
    ledger.sending(grant)
    ledger.sent(now_ns)


def test_a_replaced_grant_is_refunded_after_two_reports() -> None:
    """Without what was reported as allowed; with the time at which it was charged."""
    ledger = ledger_with(Grant(10, TTL_S, 77), Grant(5, TTL_S, 88))
    assert ledger.reported(3, 0, REPORT_NS + DELIVERY_NS - 1) == []
    assert ledger.reported(1, 0, 2 * REPORT_NS) == []
    assert ledger.reported(1, 0, 2 * REPORT_NS + 1) == []  # it may be the same report again
    assert ledger.reported(0, 0, 3 * REPORT_NS) == [Refund(5, 77)]
    assert ledger.reported(0, 0, 4 * REPORT_NS) == []


def test_the_grant_in_use_is_never_refunded() -> None:
    """However many reports come."""
    ledger = ledger_with(Grant(10, TTL_S, 77))
    for number in range(1, 9):
        assert ledger.reported(0, 0, number * REPORT_NS) == []


def test_requests_of_the_next_grant_may_count_for_the_one_before() -> None:
    """The report does not say which they are, so none of the first is refunded."""
    ledger = ledger_with(Grant(10, TTL_S, 77), Grant(10, TTL_S, 88), NO_UNITS)
    assert ledger.reported(10, 0, 3 * REPORT_NS) == []
    assert ledger.reported(0, 0, 4 * REPORT_NS) == [Refund(10, 88)]


def test_after_a_missing_report_everything_counts_as_spent() -> None:
    """Also what is still in use; grants from then on are refunded again."""
    ledger = ledger_with(Grant(10, TTL_S, 77), Grant(5, TTL_S, 88))
    late_ns = REPORT_NS + grants.REPORT_NS_MAX + 1
    assert ledger.reported(1, 0, late_ns) == []
    send(ledger, Grant(4, TTL_S, 99), late_ns)
    assert ledger.reported(0, 0, late_ns + REPORT_NS) == []
    send(ledger, NO_UNITS, late_ns + REPORT_NS)
    for number in (2, 3):
        found = ledger.reported(0, 0, late_ns + number * REPORT_NS)
    assert found == [Refund(3, 99)]


def test_a_new_window_refunds_nothing_of_the_last() -> None:
    """Otherwise requests of the new one could count for the old, and be refunded in the new."""
    ledger = ledger_with(
        Grant(10, TTL_S, 77, (1,)), Grant(10, TTL_S, 88, (2,)), Grant(1, TTL_S, 99, (2,))
    )
    assert ledger.reported(10, 0, 3 * REPORT_NS) == []
    assert ledger.reported(0, 0, 4 * REPORT_NS) == []


def test_counts_of_another_stream_are_ignored() -> None:
    """The first report of a stream may count what an earlier grant allowed."""
    ledger = GrantLedger(0)
    assert ledger.reported(500, 0, NS_PER_SECOND) == []
    send(ledger, Grant(10, TTL_S, 77), NS_PER_SECOND)
    send(ledger, NO_UNITS, 2 * NS_PER_SECOND)
    assert ledger.reported(0, 0, 6 * NS_PER_SECOND) == []
    assert ledger.reported(0, 0, 11 * NS_PER_SECOND) == [Refund(10, 77)]


def test_the_ledger_is_bounded() -> None:
    """Grants beyond the bound count as spent."""
    ledger = GrantLedger(0)
    for number in range(3 * GRANTS_MAX):
        send(ledger, Grant(1, TTL_S, number), number)
    assert len(ledger._grants) == GRANTS_MAX
    ledger.reported(0, 0, REPORT_NS)
    assert len(ledger.reported(0, 0, 2 * REPORT_NS)) == GRANTS_MAX - 1


# ── When and how much ──────────────────────────────────────────────────────────────────────────


def test_when_a_grant_is_due() -> None:
    """At first; when a report shows less than half; when it is probably used up; before its end."""
    ledger = GrantLedger(0)
    assert ledger.is_due(0)
    assert ledger.wanted is None
    send(ledger, Grant(100, TTL_S, 0), 0)
    assert not ledger.is_due(0)
    ledger.reported(40, 0, 5 * NS_PER_SECOND)
    assert not ledger.is_due(5 * NS_PER_SECOND)
    assert ledger.wanted == 51
    ledger.reported(20, 0, 6 * NS_PER_SECOND)
    assert ledger.is_due(6 * NS_PER_SECOND)
    send(ledger, Grant(40, TTL_S, 0), 6 * NS_PER_SECOND)
    assert not ledger.is_due(8 * NS_PER_SECOND - 1)
    assert ledger.is_due(8 * NS_PER_SECOND)  # 20 in a second
    ledger.reported(0, 0, 11 * NS_PER_SECOND)
    assert not ledger.is_due(11 * NS_PER_SECOND)
    assert ledger.is_due(6 * NS_PER_SECOND + TTL_S * NS_PER_SECOND - grants.REPLACED_NS)


def test_without_room_an_envoy_is_told_before_its_grant_ends() -> None:
    """And the worker tries again a second later."""
    ledger = GrantLedger(0)
    assert ledger.denied(0)
    send(ledger, NO_UNITS, 0)
    assert not ledger.is_due(grants.RETRY_NS - 1)
    assert ledger.is_due(grants.RETRY_NS)
    assert not ledger.denied(grants.RETRY_NS)
    assert ledger.denied(TTL_S * NS_PER_SECOND)
    assert ledger.current == NO_UNITS


@given(st.integers(0, 10**10), st.one_of(st.none(), st.integers(1, 10**9)), st.integers(0, 99))
def test_a_grant_leaves_room_for_others(room: int, wanted: int | None, envoys: int) -> None:
    """At most half of a fair part; if little is wanted, a sixteenth of that; at least 1."""
    units = size_of(wanted, room, envoys)
    assert units <= max(room // (2 * max(envoys, 1)), 1)
    assert units <= room
    assert bool(units) == bool(room)
    assert wanted is None or units <= max(wanted, room // (32 * max(envoys, 1)), 1)


@pytest.mark.parametrize(
    ("algorithm", "at_s", "ttl_s"),
    [
        *(("fixed_window", 0, TTL_S), ("fixed_window", 50, 8), ("fixed_window", 57, 1)),
        *(("fixed_window", 57.5, None), ("sliding_window_counter", 59.9, None)),
        *(("sliding_window_log", 59.9, TTL_S), ("token_bucket", 59.9, TTL_S)),
    ],
)
def test_a_grant_ends_before_its_window(algorithm: str, at_s: float, ttl_s: int | None) -> None:
    """With the time that it takes to arrive."""
    limit = Limit(5, per=60, algorithm=algorithm)  # type: ignore[arg-type]  # a name
    charged_ns = 600 * NS_PER_SECOND + int(at_s * NS_PER_SECOND)
    grant = grant_of([Limit(9, per=3_600), limit], 3, charged_ns)
    assert (grant and grant.ttl_s) == ttl_s
    if grant is not None and "window_" not in algorithm and algorithm != "token_bucket":
        assert grant.window == (10,)
    assert LIFETIME_NS == TTL_S * NS_PER_SECOND + SEND_NS_MAX + DELIVERY_NS


class Counter:
    """Units that are left, of which others take some between the look and the charge."""

    def __init__(self, left: int, seen: int) -> None:
        self.left, self.seen = left, seen
        self.asked: list[int] = []

    def charge(self, units: int) -> str | None:
        """Charge all or nothing."""
        self.asked.append(units)
        return "charged" if units <= self.left else None


@pytest.mark.parametrize(
    ("left", "seen", "found", "asked"),
    [
        (100, 100, (40, "charged"), [40]),
        (9, 100, (5, "charged"), [40, 20, 10, 5]),
        (0, 100, (0, None), [40, 20, 10, 5, 2, 1]),
        (0, 0, (0, None), []),
    ],
)
def test_as_much_is_charged_as_fits(
    left: int, seen: int, found: tuple[int, str | None], asked: list[int]
) -> None:
    """If others are faster, half as much, and so on."""
    counter = Counter(left, seen)
    assert run(charging(lambda: counter.seen, counter.charge, 40, 1)) == found
    assert counter.asked == asked
