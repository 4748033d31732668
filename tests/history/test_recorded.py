"""Requests made from recorded decisions: values, digests, and rules that cannot be replayed."""

from __future__ import annotations

import pytest

from ratekeeper import Request
from ratekeeper.history import recorded
from ratekeeper.history.events import SubjectMode, recorded_value
from ratekeeper.history.recorded import (
    RecordedRequests,
    entry_values,
    hidden_fields,
    named_values,
    replayed_document,
    unreadable,
)
from ratekeeper.rules.document.reading import read
from ratekeeper.rules.entry_table import EntryTable
from tests.history.decided import Asked, decided

WHO = Request(
    user="ann", api_key="sk_1", ip="192.0.2.7", tenant="acme", endpoint="/orders", method="POST"
)
ALL = "version: 1\nrules: [{id: all, by: [], limits: 9/hour}]"
BY_KEY = "version: 1\nrules: [{id: keys, by: api_key, limits: 9/hour}]"


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("by: user", {}),
        ("by: [tenant, user], match: {user: ann}", {"none": "it reads user"}),
        ("by: user", {"none": "it reads user"}),
        ("by: region", dict.fromkeys(["plain", "hashed", "none"], "it reads region")),
        ("by: [], match: {attributes: {plan: a}}", {"plain": "attributes are not recorded"}),
        ("by: [], match: {api_key: sk_*}", {"plain": "sk_*", "hashed": "sk_*", "none": "api_key"}),
        ("by: [], match: {api_key: '*'}", {"none": "api_key"}),
        ("by: [], match: {tenant: ac*}", {"hashed": "tenant is recorded as a digest"}),
        ("by: [], match: {ip: 192.0.2.7}", {"hashed": "ip is recorded as a digest"}),
        ("by: api_key, keys: {sk_1: 1/s}", {}),
        ("by: api_key, keys: {'sk_*': 1/s}", {"plain": "sk_*", "hashed": "sk_*"}),
        ("by: user, keys: {'a*': 1/s}", {"hashed": "a*"}),
        ("by: endpoint, match: {method: POST, endpoint: /a/*}", {}),
    ],
)
def test_rules_that_need_what_records_lack(rule: str, why: dict[SubjectMode, str]) -> None:
    """The reason names the field; a rule that reads recorded fields has none."""
    found = read(f"version: 1\nrules: [{{id: a, {rule}, limits: 9/hour}}]").rules[0]
    for mode in ("plain", "hashed"):
        said = unreadable(found, mode, hidden_fields(mode))
        assert why.get(mode, "") in said
        assert bool(said) == (mode in why) or "attributes" in said
    if "none" in why:
        assert why["none"] in unreadable(found, "none", frozenset())


def test_a_request_has_what_was_recorded() -> None:
    """In plain mode everything but the key."""
    [row] = decided(ALL, [Asked(0, WHO)])
    requests = RecordedRequests("plain")
    requests.learn_row(row)
    found = requests.request_of(row)
    digest = recorded_value("sk_1", "hashed")
    assert found == Request(
        user="ann", api_key=digest, ip="192.0.2.7", tenant="acme", endpoint="/orders", method="POST"
    )
    assert requests.hidden() == {"api_key"}


def test_a_subject_reveals_its_key() -> None:
    """Also for the rows of the same key that do not have it."""
    [with_key] = decided(BY_KEY, [Asked(0, WHO)])
    [without] = decided(ALL, [Asked(1, WHO)])
    requests = RecordedRequests("plain")
    for row in (without, with_key):
        requests.learn_row(row)
    assert requests.request_of(without).api_key == "sk_1"
    assert requests.hidden() == frozenset()


def test_a_key_in_the_subject_of_another_client_reveals_nothing() -> None:
    """The value must have the digest of the row."""
    [row] = decided(BY_KEY, [Asked(0, WHO)])
    forged = row._replace(subject="api_key:sk_2")
    requests = RecordedRequests("plain")
    requests.learn_row(forged)
    assert requests.request_of(forged).api_key == recorded_value("sk_1", "hashed")


def test_named_values_are_matched_and_not_counted() -> None:
    """Rules match the value; the subject, which replies show, keeps the digest."""
    [row] = decided(ALL, [Asked(0, WHO)], mode="hashed")
    requests = RecordedRequests("hashed")
    requests.learn_value("ann")
    found = requests.request_of(row)
    assert found.user == recorded_value("ann", "hashed")
    assert found.matched_as.user == "ann"
    assert found.matched_as.tenant == recorded_value("acme", "hashed")


def test_values_that_documents_and_entries_name() -> None:
    """Exact values of rules, keys, assignments, overrides and lists."""
    document = read(
        "version: 1\ntiers: {pro: 1/s}\nrules: [{id: a, by: api_key, limits: 1/s, "
        "match: {user: [u1, 'u*']}, keys: {sk_1: 2/s}}]\nassign: {'user:u2': pro}\n"
        "overrides: [{for: {user: u3}, multiply: 2}]\nallow: ['api_key:sk_2', 'user:u4']"
    )
    found = set(named_values(document, hidden_fields("hashed")))
    assert {"u1", "u2", "u3", "u4", "sk_1", "sk_2"} <= found
    assert "u*" not in found
    table = EntryTable()
    override = '{"for":{"api_key":"sk_4"},"multiply":2,"until":"2040-01-01T00:00:00+00:00"}'
    table.apply(
        [
            ("assignment", "api_key:sk_3", "pro", 1, False),
            ("assignment", "user:u5", "pro", 2, False),
            ("override", "ov_1", override, 3, False),
            ("deny", "api_key:sk_5", "api_key:sk_5", 4, False),
            ("allow", "api_key:sk_6", "api_key:sk_6", 5, False),
            ("deny", "ip:10.0.0.0/8", "10.0.0.0/8", 6, False),
        ],
        6,
    )
    [values] = entry_values(table, frozenset({"api_key"}))
    assert set(values) == {"sk_3", "sk_4", "sk_5", "sk_6"}
    assert len(values) == 4


def test_values_of_many_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in portions, and not all of them."""
    monkeypatch.setattr(recorded, "ENTRIES_DIGESTED_MAX", 1_500)
    table = EntryTable()
    table.apply([("assignment", f"user:{at}", "pro", at, False) for at in range(2_500)], 2_500)
    assert list(map(len, entry_values(table, frozenset({"user"})))) == [1_000, 500]
    assert list(entry_values(table, frozenset({"tenant"}))) == [[], [], []]


def test_a_document_for_one_process() -> None:
    """Nodes, regions, loads and splits are left out; other fields stay."""
    document = read(
        "version: 1\ntiers: {pro: {limits: 1/s, consistency: leased}}\nrules: [{id: a, by: user, "
        "limits: 1/s, consistency: eventual, scale: {source: cpu}, rollout: 50}, "
        "{id: b, by: tenant, limits: 1/s, scope: global}, {id: c, by: ip, limits: 1/s, split: 4}]"
    )
    found = replayed_document(document, ["c"])
    assert not list(found.not_strict())
    first, second, third = found.rules
    assert (first.scale, first.rollout, first.mode) == ((), 50, "enforce")
    assert (second.across, third.split, third.mode) == (None, 1, "off")
