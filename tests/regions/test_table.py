"""The table of shares, and how it changes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.regional import Shares
from ratekeeper.regions.table import (
    BEFORE_NS,
    EPOCH_MAX,
    REGION_NOTE,
    TABLE_NOTE,
    VERSION_MAX,
    Membership,
    ShareTable,
    newest_table,
    next_shares,
    parse_region,
    share_table,
    shares_with,
    shares_without,
)

HALF = share_table(1, {"eu": 0.5, "us": 0.5})
NEXT = share_table(2, {"eu": 0.2, "us": 0.8})


def test_the_epoch_tells_tables_apart() -> None:
    """A later version is a later epoch, and two tables of one version are different epochs."""
    other = share_table(1, {"eu": 0.4, "us": 0.6})
    assert HALF.epoch != other.epoch
    assert max(HALF.epoch, other.epoch) < NEXT.epoch
    assert share_table(1, {"us": Fraction(1, 2), "eu": 0.5}) == HALF


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({"eu": 0.5, "us": 0.4}, "add up to 9/10"),
        ({}, "0 regions"),
        ({"EU": 1}, "not the name"),
        ({"eu": 1, "us": 0}, "above 0"),
    ],
)
def test_a_wrong_table_is_refused(shares: dict[str, float], says: str) -> None:
    """The error says what is wrong."""
    with pytest.raises(ConfigError, match=says):
        share_table(2, shares)


def test_a_share_falls_at_once_and_rises_when_all_have_announced() -> None:
    """In between, shares add up to less than 1."""
    eu = next_shares("eu", HALF, None, {}, 0, (), first=True)
    us = next_shares("us", HALF, None, {}, 0, (), first=True)
    eu = next_shares("eu", NEXT, eu, {}, 1, ())
    us = next_shares("us", NEXT, us, {}, 1, ())
    assert (eu.share, us.share) == (Fraction(1, 5), Fraction(1, 2))
    us = next_shares("us", NEXT, us, {"eu": HALF.epoch}, 2, ())
    assert us.share == Fraction(1, 2)
    us = next_shares("us", NEXT, us, {"eu": NEXT.epoch}, 3, ())
    assert us[:4] == (NEXT.epoch, Fraction(4, 5), Fraction(1, 2), 3)


def test_the_lowest_share_is_remembered_for_longer_than_a_month() -> None:
    """Subjects that no client has touched since start with what the region had at least."""
    us = Shares(HALF.epoch, Fraction(1, 2), Fraction(0), 0, ())  # added at 0
    announced = {"eu": NEXT.epoch}
    soon = next_shares("us", NEXT, us, announced, BEFORE_NS, ())
    later = next_shares("us", NEXT, us, announced, BEFORE_NS + 1, ())
    assert (soon.before, later.before) == (0, Fraction(1, 2))
    down = share_table(2, {"eu": 0.8, "us": 0.2})
    soon = next_shares("us", down, us, {}, BEFORE_NS, ())
    later = next_shares("us", down, us, {}, BEFORE_NS + 1, ())
    assert (soon.before, later.before) == (0, Fraction(1, 5))


def test_a_region_that_has_skipped_a_table_is_not_counted_on() -> None:
    """It has announced a later table, and may have a higher share than this one gives it."""
    us = next_shares("us", HALF, None, {}, 0, (), first=True)
    later = share_table(3, {"eu": 0.5, "us": 0.5})
    assert next_shares("us", NEXT, us, {"eu": later.epoch}, 1, ()).share == Fraction(1, 2)


def test_a_region_that_returns_goes_on_only_if_the_table_is_the_same() -> None:
    """Its store has lost the shares. It does not use a share that others have now, nor counts
    that may be lost with the shares."""
    first = Membership("us", HALF, [])
    notes = {REGION_NOTE: first.plan({}, None, 5, ()).note}
    again = Membership("us", HALF, []).plan(notes, None, 9, ()).shares
    assert again is not None
    assert again[1:4] == (Fraction(1, 2), 0, 9)
    for shares in ({"eu": 1.0}, {"eu": 0.5, "us": 0.5}):  # it was removed, and maybe added again
        notes[TABLE_NOTE] = share_table(3, shares).text()
        plan = Membership("us", HALF, []).plan(notes, None, 9, ())
        assert plan.shares is not None
        assert plan.shares.share == 0


def test_a_first_start_writes_its_note_before_it_takes_its_share() -> None:
    """An answer to a call that began before the note was written does not count."""
    first = Membership("us", HALF, ["eu"])
    assert first.plan({}, None, 5, ()).shares is None  # eu was not asked yet
    first.asks("eu")
    first.hear("eu", {})
    plan = first.plan({}, None, 5, ())
    assert plan.shares is None
    assert not first.has_asked_all
    note = parse_region(plan.note)
    assert (note.starts, note.announced) == (True, {"us": HALF.epoch})
    first.asks("eu")
    notes = {REGION_NOTE: plan.note}
    first.plan(notes, None, 5, ())
    first.hear("eu", {})
    assert first.plan(notes, None, 5, ()).shares is None
    first.asks("eu")
    first.hear("eu", {})
    plan = first.plan(notes, None, 5, ())
    assert plan.shares is not None
    assert (plan.shares.share, plan.shares.before) == (Fraction(1, 2), Fraction(1, 2))
    assert not parse_region(plan.note).starts


def test_another_leader_goes_on_with_a_first_start() -> None:
    """The note says that the region has not taken its share, so it starts with all units."""
    first = Membership("us", HALF, ["eu"])
    first.hear("eu", {})
    notes = {REGION_NOTE: first.plan({}, None, 5, ()).note}
    second = Membership("us", HALF, ["eu"])
    second.hear("eu", {})
    shares = second.plan(notes, None, 5, ()).shares
    assert shares is not None
    assert shares.before == Fraction(1, 2)


def test_a_region_that_is_lost_between_both_answers_gives_no_units_at_once() -> None:
    """It may have started with another table since."""
    first = Membership("us", HALF, ["eu"])
    first.hear("eu", {})
    notes = {REGION_NOTE: first.plan({}, None, 5, ()).note}
    first.plan(notes, None, 5, ())
    first.missed("eu")
    first.hear("eu", {})
    shares = first.plan(notes, None, 5, ()).shares
    assert shares is not None
    assert (shares.share, shares.before) == (Fraction(1, 2), 0)


def test_a_first_start_beside_another_table_takes_no_share() -> None:
    """Not even if the other region has adopted this one's table meanwhile."""
    low, high = sorted([HALF, share_table(1, {"eu": 0.9, "us": 0.1})], key=lambda each: each.epoch)
    eu, us = Membership("eu", low, ["us"]), Membership("us", high, ["eu"])
    notes = {}
    for name, each, other in (("eu", eu, "us"), ("us", us, "eu")):
        each.hear(other, {})
        notes[name] = {REGION_NOTE: each.plan({}, None, 5, ()).note}
        each.plan(notes[name], None, 5, ())
    late = Membership("us", high, ["eu"])
    us.hear("eu", notes["eu"])
    plan = us.plan(notes["us"], None, 5, ())
    assert plan.shares is not None
    assert plan.shares.share == 0
    assert "the settings of eu have other shares" in plan.problem
    eu.hear("us", notes["us"])
    found = eu.plan(notes["eu"], None, 5, ())
    assert parse_region(found.note).table == high
    late.hear("eu", {REGION_NOTE: found.note})
    shares = late.plan(notes["us"], None, 5, ()).shares
    assert shares is not None
    assert shares.before == 0


def test_an_epoch_that_no_table_can_have_is_not_passed_on() -> None:
    """Leaders keep the highest: a region could never announce its table any more."""
    us = Membership("us", HALF, [])
    note = json.loads(us.plan({}, None, 5, ()).note)
    assert note["announced"] == {"us": HALF.epoch}
    last = share_table(VERSION_MAX, {"us": 1.0}).epoch
    assert HALF.epoch < last <= EPOCH_MAX < 2**53
    note["announced"] |= {"ap": EPOCH_MAX + 1, "za": -1, "us": 2**80, "eu": last}
    eu = Membership("eu", HALF, ["us"])
    assert eu.hear("us", {REGION_NOTE: json.dumps(note)}).usable
    plan = eu.plan({}, None, 5, ())
    assert parse_region(plan.note).announced == {"eu": HALF.epoch}


def test_a_first_start_without_the_others_gives_no_units_at_once() -> None:
    """The store may have lost its data, and nobody who knows of it can be reached."""
    first = Membership("us", HALF, ["eu"])
    first.missed("eu")
    plan = first.plan({}, None, 5, ())
    assert plan.shares is not None
    assert (plan.shares.share, plan.shares.before) == (Fraction(1, 2), 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", "Infinity"),
        ("table", '{"version": 1e999, "shares": {"us": "1"}}'),
        ("table", '{"version": 1, "shares": {"us": "1e999999999"}}'),
        ("shares", '[1, "1e999999999", "0", 0]'),
        ("shares", "[1, Infinity, 0, 0]"),
        ("announced", '{"eu": Infinity}'),
    ],
)
def test_no_number_of_a_note_stops_the_leader(field: str, value: str) -> None:
    """Such a note cannot be read, at once and with that reason."""
    note = json.loads(Membership("us", HALF, []).plan({}, None, 5, ()).note)
    text = json.dumps({**note, field: "?"}).replace('"?"', value)
    heard = Membership("eu", HALF, ["us"]).hear("us", {REGION_NOTE: text})
    assert not heard.usable
    assert "cannot be read" in heard.problem or "not a table" in heard.problem


def test_a_region_is_added_and_removed_in_proportion() -> None:
    """Shares always add up to 1, also after many changes, with allowed denominators."""
    shares = {"eu": Fraction(1, 3), "us": Fraction(2, 3)}
    for number, share in enumerate((Fraction(1, 7), Fraction(3, 11), Fraction(9, 97), None)):
        shares = shares_with(shares, f"r{number}", share)
        share_table(1, shares)
    for number in (2, 0, 3, 1):
        shares = shares_without(shares, f"r{number}")
        share_table(1, shares)
    assert abs(shares["eu"] - Fraction(1, 3)) < Fraction(1, 1_000)


def test_a_region_is_added_once_and_the_last_one_stays() -> None:
    """The errors name the regions that have a share."""
    with pytest.raises(ConfigError, match="has the share 1/2 already"):
        shares_with(dict(HALF.shares), "us", None)
    with pytest.raises(ConfigError, match="the regions with a share are eu, us"):
        shares_without(dict(HALF.shares), "mars")
    with pytest.raises(ConfigError, match="only region"):
        shares_without({"eu": Fraction(1)}, "eu")
    with pytest.raises(ConfigError, match="leaves nothing"):
        shares_with({"eu": Fraction(1)}, "us", Fraction(1))


# ── Random changes ─────────────────────────────────────────────────────────────────────────────

NAMES = ("ap", "eu", "us", "za")
EQUAL = share_table(1, dict.fromkeys(NAMES, Fraction(1, len(NAMES))))


@dataclass
class Region:
    """The store of a region, and what its leader knows."""

    name: str
    first: ShareTable = EQUAL
    notes: dict[str, str] = field(default_factory=dict)
    shares: Shares | None = None
    gone: bool = False
    leader: Membership = field(init=False)

    def __post_init__(self) -> None:
        self.lead()

    def lead(self) -> None:
        """A new process leads: it knows nothing."""
        self.leader = Membership(
            self.name, self.first, [each for each in NAMES if each != self.name]
        )

    def manage(self, now_ns: int, *, dies: bool = False) -> None:
        """Do what the plan says; a leader may die between its two parts."""
        plan = self.leader.plan(dict(self.notes), self.shares, now_ns, ())
        if plan.shares is not None:
            self.shares = plan.shares
        if dies:
            self.lead()
        elif plan.note:
            self.notes[REGION_NOTE] = plan.note

    @property
    def share(self) -> Fraction:
        """The share in use."""
        return Fraction(0) if self.shares is None or self.gone else self.shares.share


class Regions:
    """Four regions, of which some cannot reach others."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.now_ns = 1
        self.all = {name: Region(name) for name in NAMES}
        self.cuts: set[tuple[str, str]] = set()

    @property
    def here(self) -> list[Region]:
        """The regions that are not gone."""
        return [each for each in self.all.values() if not each.gone]

    def greet(self, one: Region, other: Region) -> None:
        """One region's leader reads the notes of another one."""
        if other.gone or (one.name, other.name) in self.cuts:
            one.leader.missed(other.name)
        else:
            one.leader.asks(other.name)
            one.leader.hear(other.name, dict(other.notes))

    def greet_all(self, one: Region) -> None:
        """Read the notes of all others."""
        for other in self.all.values():
            if other is not one:
                self.greet(one, other)

    def command(self) -> None:
        """Write a new table into some of the stores. Regions that are gone are removed."""
        draw = self.draw
        names = [each.name for each in self.here]
        parts = [draw.randint(1, 9) for _ in names]
        shares = {name: Fraction(part, sum(parts)) for name, part in zip(names, parts, strict=True)}
        reached = draw.sample(self.here, draw.randint(1, len(self.here)))
        tables = [newest_table(each.notes) for each in reached]
        version = max([1, *(each.version for each in tables if each is not None)]) + 1
        for each in reached:
            each.notes[TABLE_NOTE] = share_table(version, shares).text()

    def go(self) -> None:
        """A region is gone; the others are told so."""
        if len(self.here) > 2:
            self.draw.choice(self.here).gone = True
            self.command()

    def come(self) -> None:
        """A region returns. Its shares have expired; its store may be lost."""
        gone = [each for each in self.all.values() if each.gone]
        if gone:
            region = self.draw.choice(gone)
            region.gone, region.shares = False, None
            if self.draw.random() < 0.3:
                region.notes.clear()
            region.lead()
            self.cuts = {cut for cut in self.cuts if region.name not in cut}
            self.greet_all(region)
            self.command()

    def lose(self, region: Region) -> None:
        """A store loses its data. Its leader reaches the other regions."""
        region.shares = None
        region.notes.clear()
        self.cuts = {cut for cut in self.cuts if region.name not in cut}
        self.greet_all(region)
        region.manage(self.now_ns)

    def step(self) -> None:
        """Something happens."""
        draw = self.draw
        self.now_ns += 1
        match draw.choices(
            ["greet", "manage", "lead", "command", "cut", "heal", "go", "come", "lose"],
            [40, 40, 4, 4, 6, 2, 1, 2, 1],
        ):
            case ["greet"]:
                self.greet_all(draw.choice(self.here))
            case ["manage"]:
                draw.choice(self.here).manage(self.now_ns, dies=draw.random() < 0.1)
            case ["lead"]:
                draw.choice(self.here).lead()
            case ["command"]:
                self.command()
            case ["cut"]:
                self.cuts.add((draw.choice(NAMES), draw.choice(NAMES)))
            case ["heal"]:
                self.cuts.clear()
            case ["go"]:
                self.go()
            case ["come"]:
                self.come()
            case ["lose"]:
                self.lose(draw.choice(self.here))

    def settle(self) -> None:
        """All reach each other for a while."""
        self.cuts.clear()
        for _ in range(8):
            for region in self.here:
                self.greet_all(region)
                region.manage(self.now_ns)


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 2**32))
def test_shares_never_add_up_to_more_than_1(seed: int) -> None:
    """Whatever leaders hear and when, and whenever they die; in the end all use one table.

    A region that is removed is gone, and when it returns it reaches another one.
    """
    regions = Regions(random.Random(seed))
    for _ in range(150):
        regions.step()
        total = sum((each.share for each in regions.all.values()), Fraction(0))
        assert total <= 1, [(each.name, each.shares) for each in regions.here]
    regions.settle()
    regions.command()
    regions.settle()
    table = regions.here[0].leader.table
    assert {each.leader.table for each in regions.here} == {table}
    for each in regions.here:
        assert each.share == table.share(each.name)
    assert sum((each.share for each in regions.here), Fraction(0)) == 1


@settings(max_examples=settings().max_examples * 6 // 5)
@given(seed=st.integers(0, 2**32))
def test_settings_with_different_shares_never_add_up_to_more_than_1(seed: int) -> None:
    """Also if all regions start for the first time at once, and answers arrive late.

    Nor does a region start with units of a share that another one has had.
    """
    draw = random.Random(seed)
    tables = [
        share_table(1, {each: 0.7 if each == name else 0.1 for each in NAMES}) for name in NAMES
    ]
    regions = Regions(draw)
    regions.all = {name: Region(name, draw.choice([EQUAL, *tables])) for name in NAMES}
    answers: dict[tuple[str, str], dict[str, str]] = {}
    spent: dict[str, Fraction] = dict.fromkeys(NAMES, Fraction(0))
    for _ in range(200):
        one, other = (regions.all[name] for name in draw.sample(NAMES, 2))
        match draw.choice(["read", "hear", "manage"]):
            case "read" if (one.name, other.name) not in answers:
                one.leader.asks(other.name)
                answers[one.name, other.name] = dict(other.notes)
            case "hear" if (one.name, other.name) in answers:
                one.leader.hear(other.name, answers.pop((one.name, other.name)))
            case "manage":
                one.manage(1)
                if one.shares is not None:
                    spent[one.name] = max(spent[one.name], one.shares.before)
        assert sum((each.share for each in regions.here), Fraction(0)) <= 1
        assert sum(spent.values(), Fraction(0)) <= 1
    regions.settle()
    assert sum((each.share for each in regions.here), Fraction(0)) == 1
