"""Replays of recorded decisions: what they find, how they agree, and what they cannot know."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper import Request
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.history.replay import (
    EXAMPLES_MAX,
    SUBJECTS_MAX,
    Replay,
    ReplayReport,
    _percent,
    sampled_weight,
)
from ratekeeper.rules.document.reading import from_data, read
from ratekeeper.rules.document.writing import to_yaml
from ratekeeper.rules.entries import assignment, list_entry, override_entry, parse_override
from ratekeeper.rules.entry_table import EntryTable
from tests.history.decided import START_S, Asked, decided, decided_events, replayed

HOUR = "version: 1\nrules: [{id: orders, by: user, limits: %s/hour}]"
TEN = HOUR % 10


def asked_by(user: str, count: int, **more: Any) -> list[Asked]:
    """Return requests of a user, one a second."""
    return [
        Asked(second, Request(user=user, endpoint="/orders", **more)) for second in range(count)
    ]


def merged(*several: list[Asked]) -> list[Asked]:
    """Return requests of several users in the order of time."""
    return sorted((each for one in several for each in one), key=lambda each: each.at_s)


def numbers(report: ReplayReport) -> tuple[int, int, int, int]:
    """Return denials before and after, and newly denied and newly allowed requests."""
    total = report.total
    return total.before, total.after, total.newly_denied, total.newly_allowed


# ── Differences ──────────────────────────────────────────────────────────────────────────────────

ASKED = merged(asked_by("ann", 12), asked_by("bob", 8), asked_by("cy", 3))


@pytest.mark.parametrize(
    ("draft", "expected", "by_user"),
    [
        (TEN, (2, 2, 0, 0), {"ann": (2, 2)}),
        (HOUR % 5, (2, 10, 8, 0), {"ann": (2, 7), "bob": (0, 3)}),
        (HOUR % 11, (2, 1, 0, 1), {"ann": (2, 1)}),
        (HOUR % 100, (2, 0, 0, 2), {"ann": (2, 0)}),
        ("version: 1\nrules: []", (2, 0, 0, 2), {"ann": (2, 0)}),
    ],
)
def test_a_change_of_the_limit(
    draft: str, expected: tuple[int, int, int, int], by_user: dict[str, tuple[int, int]]
) -> None:
    """A lower limit denies exactly these requests, a higher one frees exactly these."""
    report = replayed(decided(TEN, ASKED), TEN, draft)
    assert numbers(report) == expected
    found = {subject: (each.before, each.after) for subject, each in report.subjects}
    assert found == {f"user:{user}": each for user, each in by_user.items()}
    assert (report.decisions, report.requests, report.agreed) == (23, 23, 23)
    assert report.recorded_denied == 2


def test_the_largest_differences_come_first() -> None:
    """Subjects, endpoints and examples name the clients for whom it changes most."""
    report = replayed(decided(TEN, ASKED), TEN, HOUR % 2)
    assert [subject for subject, _ in report.subjects] == ["user:ann", "user:bob", "user:cy"]
    [(endpoint, change)] = report.endpoints
    assert (endpoint, change.newly_denied) == ("/orders", 8 + 6 + 1)
    assert {each.request.user_id for each in report.examples} == {"ann", "bob", "cy"}
    first = report.examples[0]
    assert (first.before.denied, first.after.denied, first.after.rule) == (False, True, "orders")
    assert first.after.retry_after_ns > 0


def test_lists_are_bounded() -> None:
    """Many clients that differ give at most SUBJECTS_MAX subjects and EXAMPLES_MAX examples."""
    several = merged(*(asked_by(f"u{number}", 2) for number in range(100)))
    report = replayed(decided(TEN, several), TEN, HOUR % 1)
    assert (len(report.subjects), len(report.examples)) == (SUBJECTS_MAX, EXAMPLES_MAX)
    assert report.total.newly_denied == 100


def test_a_rule_that_is_added_and_one_that_is_removed() -> None:
    """Each denial counts for the rule that denies it; a request may move from one to another."""
    draft = "version: 1\nrules: [{id: by-path, by: endpoint, limits: 20/hour}]"
    report = replayed(decided(TEN, ASKED), TEN, draft)
    assert numbers(report) == (2, 3, 1, 0)
    found = {rule: (each.before, each.after) for rule, each in report.rules}
    assert found == {"orders": (2, 0), "by-path": (0, 3)}


def test_a_denial_by_another_rule_moves() -> None:
    """A request that both documents deny by different rules is neither newly denied nor allowed."""
    renamed = TEN.replace("orders", "fresh")
    report = replayed(decided(TEN, ASKED), TEN, renamed)
    assert numbers(report) == (2, 2, 0, 0)
    assert {rule: (each.before, each.after) for rule, each in report.rules} == {
        "orders": (2, 0),
        "fresh": (0, 2),
    }


def test_shadow_rules_count_what_they_would_deny() -> None:
    """A rule in shadow mode denies nothing; its numbers are apart."""
    draft = f"{TEN[:-1]}, {{id: trial, by: [user, endpoint], limits: 5/hour, mode: shadow}}]"
    report = replayed(decided(TEN, ASKED), TEN, draft)
    assert numbers(report) == (2, 2, 0, 0)
    trial = dict(report.rules)["trial"]
    assert (trial.shadow_before, trial.shadow_after, trial.after) == (0, 10, 0)
    back = replayed(decided(draft, ASKED), draft, draft.replace("shadow", "enforce"))
    trial = dict(back.rules)["trial"]
    assert (trial.shadow_before, trial.shadow_after) == (10, 0)
    assert numbers(back) == (2, 10, 8, 0)
    assert back.agreed == 23


def test_a_promoted_replacement_takes_the_place_of_its_rule() -> None:
    """`replaces` works as in the service: one of the two rules decides."""
    draft = (
        "version: 1\nrules: [{id: stricter, replaces: orders, by: user, limits: 4/hour}, "
        "{id: orders, by: user, limits: 10/hour}]"
    )
    report = replayed(decided(TEN, ASKED), TEN, draft)
    assert {rule: (each.before, each.after) for rule, each in report.rules} == {
        "orders": (2, 0),
        "stricter": (0, 8 + 4),
    }


def test_a_rollout_reaches_its_share() -> None:
    """The replay denies for the same clients that the rollout reaches in the service."""
    several = merged(*(asked_by(f"u{number}", 3) for number in range(200)))
    half = "version: 1\nrules: [{id: orders, by: user, limits: 2/hour, rollout: 50}]"
    report = replayed(decided(TEN, several), TEN, half)
    rows = decided(half, several)
    assert report.total.newly_denied == sum(row.outcome == "denied" for row in rows)
    assert 70 < report.total.newly_denied < 130


def test_tiers_assignments_and_overrides_of_the_document() -> None:
    """The draft may change a tier, an assignment or an override."""
    rules = (
        "version: 1\ntiers: {free: 2/hour, pro: 6/hour}\n"
        "rules: [{id: orders, by: user}]\nassign: {'user:ann': pro, 'user:bob': free}\n"
    )
    several = merged(asked_by("ann", 8), asked_by("bob", 8))
    rows = decided(rules, several)
    swapped = rules.replace("'user:bob': free", "'user:bob': pro")
    assert numbers(replayed(rows, rules, swapped)) == (2 + 6, 2 + 2, 0, 4)
    override = rules + "overrides: [{for: {user: bob}, limits: 5/hour}]\n"
    assert numbers(replayed(rows, rules, override)) == (8, 2 + 3, 0, 3)


def entries_of(*given: Any) -> EntryTable:
    """Return a table with these entries."""
    table = EntryTable()
    rows = [(each.kind, each.key, each.data, number, False) for number, each in enumerate(given)]
    assert table.apply(rows, len(rows)) == []
    return table


def test_entries_beside_the_document() -> None:
    """Both replays have the assignments, overrides and lists that stand beside the document."""
    rules = "version: 1\ntiers: {free: 2/hour, pro: 6/hour}\nrules: [{id: orders, by: user}]"
    now = datetime.fromtimestamp(START_S, UTC)
    raised = {"for": {"user": "bob"}, "multiply": 2, "reason": "x"}
    override = parse_override({**raised, "until": (now + timedelta(seconds=6)).isoformat()})
    entries = entries_of(
        assignment("user:ann", "pro"),
        assignment("user:bob", "free"),
        override_entry(override, now),
        list_entry("deny", "user:eve"),
        list_entry("allow", "user:root"),
    )
    several = merged(*(asked_by(user, 10) for user in ("ann", "bob", "eve", "root")))
    rows = decided(rules, several, entries=entries)
    report = replayed(rows, rules, rules.replace("6/hour", "3/hour"), entries=entries)
    assert report.agreed == report.decisions == 40
    assert {subject: (each.before, each.after) for subject, each in report.subjects} == {
        "user:ann": (4, 7),
        "user:eve": (10, 10),
        "user:bob": (6, 6),
    }
    assert dict(report.rules)["(deny)"].before == 10


def test_a_cost_that_never_fits_the_draft_is_denied() -> None:
    """The service would reject such a request; the recorded cost is the cost of the replay."""
    rows = decided(TEN, [Asked(second, Request(user="ann"), 4) for second in range(3)])
    report = replayed(rows, TEN, HOUR % 3)
    assert numbers(report) == (1, 3, 2, 0)
    assert [rule for rule, _ in report.rules] == ["orders"]


def test_penalties_are_replayed_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A cool-down of the draft denies; the log has no penalty, because nobody gets one."""
    draft = (
        "version: 1\nrules: [{id: orders, by: user, limits: 6/minute, "
        "penalty: {after: 2, within: 60s, cooldown: 600s}}]"
    )
    rows = decided("version: 1\nrules: []", asked_by("ann", 60))
    with caplog.at_level(logging.DEBUG):
        report = replayed(rows, "version: 1\nrules: []", draft)
    without = replayed(rows, "version: 1\nrules: []", draft.partition(", penalty")[0] + "}]")
    assert report.total.after > without.total.after > 40
    assert not caplog.records


# ── Agreement ────────────────────────────────────────────────────────────────────────────────────

_LIMITS = st.sampled_from(
    ["2/second", "5/minute", "3/10s burst 2", "4/hour", "2/second, 5/minute"]
).map(lambda text: text.split(", "))
_ALGORITHMS = st.sampled_from(
    ["token_bucket", "leaky_bucket", "sliding_window_log", "sliding_window_counter", "fixed_window"]
)


@st.composite
def documents(draw: st.DrawFn) -> str:
    rules: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 3))):
        rule: dict[str, Any] = {
            "id": f"r{number}",
            "by": draw(st.sampled_from([["user"], ["tenant"], ["ip"], ["tenant", "user"], []])),
            "limits": draw(_LIMITS),
            "mode": draw(st.sampled_from(["enforce", "enforce", "shadow", "off"])),
            "rollout": draw(st.sampled_from([100, 100, 50])),
        }
        if draw(st.booleans()):
            limit = {"limit": 3, "per": "10s", "algorithm": draw(_ALGORITHMS)}
            rule["limits"] = [limit]
        if draw(st.booleans()):
            rule["match"] = {"endpoint": draw(st.sampled_from(["/a", "/b/*"]))}
        if draw(st.integers(0, 3)) == 0:
            rule["penalty"] = {"after": 2, "within": "10s", "cooldown": "5s"}
        rules.append(rule)
    more: dict[str, Any] = {"tiers": {"pro": "9/second"}}
    if draw(st.booleans()):
        more["assign"] = {"user:1": "pro"}
    if draw(st.booleans()):
        more["deny"] = ["user:3"]
    if draw(st.booleans()):
        rules[0]["tiers"] = {"pro": "20/second"}
        rules[0]["cost"] = draw(st.sampled_from([1, 2]))
    return to_yaml(from_data({"version": 1, **more, "rules": rules}))


_REQUESTS = st.builds(
    Request,
    user=st.sampled_from([None, "1", "2", "3"]),
    tenant=st.sampled_from([None, "acme"]),
    ip=st.sampled_from([None, "192.0.2.1", "192.0.2.2"]),
    endpoint=st.sampled_from([None, "/a", "/b/c"]),
)
_ASKED = st.lists(
    st.tuples(st.integers(0, 3_000_000), _REQUESTS, st.sampled_from([1, 1, 1, 0])), max_size=40
)


@settings(deadline=None, max_examples=60)
@given(documents(), documents(), _ASKED)
def test_complete_records_agree_decision_for_decision(
    rules: str, draft: str, waits: list[tuple[int, Request, int]]
) -> None:
    """With sample 1, both replays decide every request as a real limiter with these rules does."""
    asked: list[Asked] = []
    at_us = 0
    for wait_us, request, cost in waits:
        at_us += wait_us
        asked.append(Asked(at_us / 10**6, request, cost))
    rows = decided_events(rules, asked)
    report = replayed(decided(rules, asked), rules, draft)
    after = decided_events(draft, asked)
    assert report.agreed == report.decisions == len(rows)
    denied = [row.outcome == "denied" for row in rows]
    denied_after = [row.outcome == "denied" for row in after]
    both = list(zip(denied, denied_after, strict=True))
    assert numbers(report) == (
        sum(denied),
        sum(denied_after),
        sum(new and not old for old, new in both),
        sum(old and not new for old, new in both),
    )
    for rule, change in report.rules:
        assert change.shadow_before == sum(rule in json.loads(row.shadow_denied) for row in rows)
        assert change.shadow_after == sum(rule in json.loads(row.shadow_denied) for row in after)
        assert change.before == sum(row.rule == rule and row.outcome == "denied" for row in rows)
    assert sum(each.before for _, each in report.subjects) == sum(denied)
    assert sum(each.after for _, each in report.rules) == sum(denied_after)


def test_rules_that_changed_in_the_period_lower_the_agreement() -> None:
    """Decisions of other rules than those in force show that the preview is less certain."""
    rows = decided(HOUR % 100, ASKED)
    report = replayed(rows, TEN, TEN)
    assert (report.agreed, report.decisions) == (21, 23)


# ── Samples ──────────────────────────────────────────────────────────────────────────────────────


def test_a_sampled_request_stands_for_several() -> None:
    """With a share of 0.25, each recorded allowed request counts as 4, spread in time."""
    rows = decided(HOUR % 1000, asked_by("ann", 40))[::4]
    report = replayed(rows, HOUR % 1000, HOUR % 30, share=0.25)
    assert (report.decisions, report.requests) == (10, 40)
    assert numbers(report) == (0, 10, 10, 0)
    assert "An estimate: of the allowed requests, 25 %" in report.notes[0]


def test_copies_are_spread_evenly() -> None:
    """Copies do not come at once: a limit of one a second passes one request a second."""
    rows = decided(HOUR % 1000, asked_by("ann", 40))[::4]
    second = "version: 1\nrules: [{id: orders, by: user, limits: 1/second}]"
    assert numbers(replayed(rows, HOUR % 1000, second, share=0.25)) == (0, 0, 0, 0)
    slower = "version: 1\nrules: [{id: orders, by: user, limits: 1/2s}]"
    found = replayed(rows, HOUR % 1000, slower, share=0.25).total.after
    assert 18 <= found <= 20


def test_denials_and_shadow_denials_stand_for_themselves() -> None:
    """They are always recorded, so they have no copies."""
    trial = "{id: trial, by: user, limits: 1/hour, mode: shadow}"
    [allowed, shadowed] = decided(f"{TEN[:-1]}, {trial}]", asked_by("ann", 2))
    [*_, denied] = decided(HOUR % 1, asked_by("ann", 2))
    assert [sampled_weight(row, 0.1) for row in (allowed, shadowed, denied)] == [10, 1, 1]
    assert sampled_weight(allowed, 1.0) == sampled_weight(allowed, 0.0) == 1


def test_a_share_that_is_no_whole_number_adds_up() -> None:
    """1 / 0.3 is 3.33…: the requests add up to it over all decisions."""
    rows = decided(HOUR % 1000, asked_by("ann", 90))
    assert replayed(rows, TEN, TEN, share=0.3).requests in {299, 300}


def test_the_only_request_of_a_client_is_spread_over_the_period() -> None:
    """A client with one recorded request is no burst."""
    rows = decided(HOUR % 1000, merged(asked_by("ann", 100), [Asked(99, Request(user="bob"))]))
    draft = "version: 1\nrules: [{id: orders, by: user, limits: 2/second}]"
    report = replayed(rows, HOUR % 1000, draft, share=0.5)
    assert "user:bob" not in dict(report.subjects)


def test_without_recorded_allowed_requests() -> None:
    """With --sample 0 the notes say that the replay knows only denials."""
    rows = [row for row in decided(TEN, ASKED) if row.outcome == "denied"]
    report = replayed(rows, TEN, TEN, share=0.0)
    assert "--sample 0" in report.notes[0]
    assert report.agreed == 0


# ── What records do not have ─────────────────────────────────────────────────────────────────────

KEYS = """
version: 1
rules:
  - {id: live, match: {api_key: sk_live_*}, by: api_key, limits: 2/hour}
  - {id: keys, by: api_key, limits: 5/hour, keys: {sk_1: 3/hour}}
"""


def keys_asked(*keys: str) -> list[Asked]:
    return merged(*([Asked(second, Request(api_key=key)) for second in range(6)] for key in keys))


def test_api_keys_are_digests_and_count_one_by_one() -> None:
    """A rule that names a key applies by the digest; one that matches a pattern is left out."""
    plain = "version: 1\nrules: [{id: all, by: [], limits: 100/hour}]"
    rows = decided(plain, keys_asked("sk_1", "sk_2"))
    report = replayed(rows, plain, KEYS)
    assert [(each.rule, each.why) for each in report.left_out] == [
        ("live", "it matches api_key by sk_live_*; api_key is recorded as a digest")
    ]
    assert sorted(each.after for _, each in report.subjects) == [1, 3]
    assert all(subject.startswith("api_key:#") for subject, _ in report.subjects)


def test_subjects_reveal_the_keys() -> None:
    """If the rule in force counts by key, the records have the key, and patterns apply."""
    rows = decided(KEYS, keys_asked("sk_1", "sk_2", "sk_live_7"))
    report = replayed(rows, KEYS, KEYS.replace("2/hour", "1/hour"))
    assert report.left_out == []
    assert report.agreed == report.decisions == 18
    assert numbers(report) == (3 + 1 + 4, 3 + 1 + 5, 1, 0)


def test_hashed_subjects() -> None:
    """With digests of users, exact values apply, and networks are left out."""
    rules = (
        "version: 1\ntiers: {pro: 8/hour, free: 2/hour}\n"
        "rules: [{id: orders, by: user}, {id: office, match: {ip: 10.0.0.0/8}, by: ip, "
        "limits: 1/hour}]\nassign: {'user:ann': pro}\ndeny: ['user:eve']"
    )
    asked = merged(*(asked_by(user, 9, ip="192.0.2.7") for user in ("ann", "bob", "eve")))
    # `user:` without a tier gets no limits; `default` is for all others.
    rules = rules.replace("free", "default")
    rows = decided(rules, asked, mode="hashed")
    report = replayed(rows, rules, rules.replace("8/hour", "5/hour"), subjects="hashed")
    assert [each.rule for each in report.left_out] == ["office"]
    assert report.agreed == report.decisions
    assert numbers(report) == (1 + 7 + 9, 4 + 7 + 9, 3, 0)
    assert all("#" in subject for subject, _ in report.subjects)
    assert any("digests" in each for each in report.notes)


def test_without_subjects() -> None:
    """Rules that count clients are left out: all clients would be one."""
    rules = f"{HOUR[:-1]}, {{id: all, by: [], limits: 9/hour}}]" % 2
    rows = decided(rules, ASKED, mode="none")
    report = replayed(rows, rules, rules, subjects="none")
    assert [(each.rule, each.decisions) for each in report.left_out] == [("orders", 23)]
    assert dict(report.rules)["all"].before == 23 - 9


def test_attributes_are_not_recorded() -> None:
    """A rule that reads an attribute is left out, and the report says how much it decided."""
    rules = (
        "version: 1\nrules: [{id: eu, match: {attributes: {region: eu}}, by: user, limits: 2/hour}]"
    )
    rows = decided(rules, asked_by("ann", 4, attributes={"region": "eu"}))
    [left_out] = replayed(rows, rules, rules).left_out
    assert left_out == ("eu", "it reads region; attributes are not recorded", 4)


def test_notes_name_rules_that_the_replay_decides_differently() -> None:
    """Long windows, loads, tiers of callers and rollouts of digests each have a sentence."""
    rules = (
        "version: 1\ntiers: {pro: 9/day}\n"
        "rules: [{id: daily, by: api_key, limits: 10/day, rollout: 50, "
        "scale: {source: cpu}, tiers: {pro: 20/day}, split: 2}]"
    )
    plain = "version: 1\nrules: [{id: all, by: [], limits: 100/second}]"
    notes = replayed(decided(plain, keys_asked("sk_1")), plain, rules).notes
    assert len(notes) == 4
    assert all("daily" in each for each in notes)


def test_rules_of_several_nodes_are_replayed_in_one() -> None:
    """Leased, eventual and global rules need nodes and regions; the replay decides them exactly."""
    draft = (
        "version: 1\nrules: [{id: a, by: user, limits: 5/hour, consistency: leased}, "
        "{id: b, by: tenant, limits: 5/hour, scope: global}]"
    )
    assert replayed(decided(TEN, ASKED), TEN, draft).total.after == 7 + 3 + 18 - 10


def test_what_is_no_decision_of_rules_is_left_out() -> None:
    """An excess between regions, and limits that came with a call, are not replayed."""
    [row] = decided(TEN, asked_by("ann", 1))
    excess = row._replace(outcome="excess")
    call = row._replace(
        user_id="", endpoint="", subject="(limit)\x1fk", rules='{"mail": "allowed"}'
    )
    assert replayed([excess, call, row], TEN, TEN).decisions == 1


def test_a_request_that_cannot_be_counted_is_left_out() -> None:
    """A recorded value may be no valid key; the replay goes on."""
    [row] = decided(TEN, asked_by("ann", 1))
    wrong = row._replace(user_id="a\x1fb")
    assert replayed([wrong, row], TEN, TEN).decisions == 1


def test_an_empty_replay() -> None:
    """Without decisions, there is nothing to report, and no error."""
    report = replayed([], TEN, TEN)
    assert (report.decisions, report.requests, report.subjects) == (0, 0, [])


def test_a_replay_that_stops_covers_both_documents_equally() -> None:
    """The report after some steps has the same requests in both replays."""
    replay = Replay(decided(TEN, ASKED), read(TEN), read(HOUR % 5))
    steps = replay.steps()
    while replay.report().decisions < 15:
        next(steps)
    steps.close()
    report = replay.report()
    assert (report.decisions, report.requests) == (15, 15)
    assert report.last_us - report.first_us < 10 * NS_PER_SECOND // 1_000


def test_percent() -> None:
    """A share is shown without needless digits."""
    assert (_percent(0.01), _percent(1 / 3)) == ("1 %", "33.3333 %")
