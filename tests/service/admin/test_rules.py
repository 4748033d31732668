"""The document and single rules over HTTP: read, put, deleted, checked, under conditions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.admin.nodes import RULES, Admin, admin, from_file, template
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import from_data, read
from tollkeeper.rules.document.writing import to_data, to_yaml

__all__ = ["admin", "from_file", "template"]  # fixtures, found by name

YAML = {"Content-Type": "application/yaml"}
OTHER = RULES.replace("10/second", "11/second")


async def document(admin: Admin) -> Document:
    """The rules in force, as the API tells them."""
    return from_data((await admin.ask("GET", "/rules")).json())


async def test_the_document_is_read_as_json_or_yaml(admin: Admin) -> None:
    """Both say the same, with the version as ETag, and caches are told what it depends on."""
    as_json = await admin.ask("GET", "/rules")
    as_yaml = await admin.ask("GET", "/rules", headers={"Accept": "application/yaml"})
    assert as_json.headers["content-type"] == "application/json"
    assert as_yaml.headers["content-type"] == "application/yaml"
    assert from_data(as_json.json()) == read(as_yaml.text) == read(RULES)
    assert as_json.headers["etag"] == as_yaml.headers["etag"] == '"v1"'
    assert as_json.headers["vary"] == "Accept"


@pytest.mark.parametrize("path", ["/rules", "/rules/orders", "/tiers", "/tiers/pro", "/lists/deny"])
async def test_nothing_is_sent_to_one_who_has_it(admin: Admin, path: str) -> None:
    """304 without a body for the newest version, however the tag is written; else all of it."""
    for known in ('"v1"', 'W/"v1"', '"v0", "v1"', "*"):
        answer = await admin.ask("GET", path, 304, headers={"If-None-Match": known})
        assert answer.content == b""
        assert answer.headers["etag"] == '"v1"'
    await admin.ask("GET", path, 200, headers={"If-None-Match": '"v0"'})


@pytest.mark.parametrize("kind", ["application/yaml", "text/yaml", "application/json", None])
async def test_a_document_is_put_in_either_form(admin: Admin, kind: str | None) -> None:
    """It is the next version, by the token's name, and read back at once."""
    content = str(to_data(read(OTHER))).replace("'", '"') if kind == "application/json" else OTHER
    headers = {"X-Reason": "more", **({"Content-Type": kind} if kind else {})}
    answer = await admin.ask("PUT", "/rules", content=content.encode(), headers=headers)
    version = answer.json()
    assert (version["number"], version["base"], version["kind"]) == (2, 1, "apply")
    assert (version["author"], version["reason"]) == ("admin-token", "more")
    assert answer.headers["etag"] == '"v2"'
    assert await document(admin) == read(OTHER)


async def test_a_change_of_another_version_is_refused(admin: Admin) -> None:
    """412 with the newest version in the ETag; with that, it is made."""
    stale = {**YAML, "If-Match": '"v7"'}
    answer = await admin.ask("PUT", "/rules", 412, content=OTHER, headers=stale)
    assert answer.headers["etag"] == '"v1"'
    assert answer.json()["current"] == 1
    for header in ('W/"v1"', '"other"'):
        await admin.refused("PUT", "/rules", 412, content=OTHER, headers={"If-Match": header})
    await admin.refused("PUT", "/rules", 412, content=OTHER, headers={"If-None-Match": "*"})
    assert await document(admin) == read(RULES)
    fresh = {**YAML, "If-Match": answer.headers["etag"]}
    assert (await admin.ask("PUT", "/rules", content=OTHER, headers=fresh)).json()["number"] == 2


async def test_one_of_several_versions_may_be_expected(admin: Admin) -> None:
    """And `*` is whichever there is."""
    for number, header in enumerate(('"v1", "v9"', "*"), start=2):
        content = RULES.replace("10/second", f"{number}/second")
        answer = await admin.ask("PUT", "/rules", content=content, headers={"If-Match": header})
        assert answer.json()["number"] == number


async def test_what_is_in_force_already_changes_nothing(admin: Admin) -> None:
    """One who did not hear the answer may ask again, with the tag that he had."""
    headers = {**YAML, "If-Match": '"v1"'}
    for _ in range(2):
        answer = await admin.ask("PUT", "/rules", content=OTHER, headers=headers)
        assert answer.json()["number"] == 2


async def test_all_problems_of_a_document_are_told_at_their_lines(admin: Admin) -> None:
    """422, and nothing has changed."""
    wrong = "version: 1\nrules:\n  - {id: a, by: user, limits: 5/x}\n  - {id: b, limits: 5/s}\n"
    found = await admin.refused("PUT", "/rules", 422, content=wrong, headers=YAML)
    assert found["error"]["code"] == "INVALID_DOCUMENT"
    places = [(each["where"], each["line"]) for each in found["problems"]]
    assert places == [("rules[0].limits", 3), ("rules[1]", 4)]
    assert (await admin.ask("GET", "/rules")).headers["etag"] == '"v1"'


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"\xff\xfe", 400, "not UTF-8 at byte 1"),
        (b"a\0b", 422, "YAML does not allow the character U+0000"),
        (b"[" * 50_000, 422, "more than 16 levels of nesting"),
        (b"{" * 50_000, 422, "more than 16 levels of nesting"),
        (b"", 422, "the document is empty"),
        (b"x" * 1_000_000, 422, "version: 1"),
        (b"a: &a [*a]", 422, "unknown alias *a"),
    ],
)
async def test_a_hostile_document_gets_a_clear_answer(
    admin: Admin, content: bytes, status: int, words: str
) -> None:
    """4xx, whatever it is."""
    found = await admin.refused("PUT", "/rules", status, content=content, headers=YAML)
    assert words in found["detail"]


async def test_what_is_unsafe_must_be_forced(admin: Admin) -> None:
    """409 with the findings; with ?force=true it is made, and the audit says what was forced."""
    unsafe = RULES + "deny: ['*']\n"
    found = await admin.refused("PUT", "/rules", 409, content=unsafe, headers=YAML)
    assert found["error"]["code"] == "UNSAFE_CHANGE"
    assert [each["code"] for each in found["findings"]] == ["denies-all"]
    assert "?force=true" in found["detail"]
    await admin.ask("PUT", "/rules?force=true", content=unsafe, headers=YAML)
    entry = (await admin.ask("GET", "/audit?limit=1")).json()["items"][0]
    assert "every request with an api_key or a user is denied" in entry["forced"]


async def test_a_document_is_checked_without_being_applied(admin: Admin) -> None:
    """What is wrong, what is unsafe, and what it would change."""
    same = (await admin.ask("POST", "/rules/validate", content=RULES)).json()
    assert same == {"valid": True, "safe": True, "problems": [], "findings": [], "diff": ""}
    unsafe = (await admin.ask("POST", "/rules/validate", content=RULES + "deny: ['*']\n")).json()
    assert (unsafe["valid"], unsafe["safe"]) == (True, False)
    assert [each["code"] for each in unsafe["findings"]] == ["denies-all"]
    assert "--- v1\n+++ <body>\n" in unsafe["diff"]
    wrong = (await admin.ask("POST", "/rules/validate", content="version: 2")).json()
    assert (wrong["valid"], wrong["safe"]) == (False, False)
    assert [each["where"] for each in wrong["problems"]] == ["version"]
    assert (await admin.ask("GET", "/rules")).headers["etag"] == '"v1"'


# ------------------------------------------------------------------------------------- one rule


async def test_a_rule_is_read_put_and_deleted(admin: Admin) -> None:
    """One at a time; the others stay as they are, where they are."""
    orders = (await admin.ask("GET", "/rules/orders")).json()
    assert orders == to_data(read(RULES))["rules"][0]
    await admin.ask("PUT", "/rules/orders", json={**orders, "limits": ["99/second"]})
    await admin.ask("PUT", "/rules/search", json={"by": ["tenant"], "limits": "5/second"})
    assert [rule.id for rule in (await document(admin)).rules] == ["orders", "login", "search"]
    moved = {"by": ["tenant"], "limits": "6/second"}
    await admin.ask("PUT", "/rules/search?before=orders", json=moved)
    assert [rule.id for rule in (await document(admin)).rules] == ["search", "orders", "login"]
    assert (await admin.ask("DELETE", "/rules/login")).json()["kind"] == "remove-rule"
    assert [rule.id for rule in (await document(admin)).rules] == ["search", "orders"]


async def test_a_rule_s_id_may_be_any_name(admin: Admin) -> None:
    """With slashes and spaces, percent-encoded; `validate` is one too."""
    for name, path in (("a/b c%", "a%2Fb%20c%25"), ("validate", "validate")):
        await admin.ask("PUT", f"/rules/{path}", json={"by": ["tenant"], "limits": "5/second"})
        assert (await admin.ask("GET", f"/rules/{path}")).json()["id"] == name
        await admin.ask("DELETE", f"/rules/{path}")


@pytest.mark.parametrize(
    ("body", "where", "words"),
    [
        ({"by": "user", "limits": "5/x"}, "rule.limits", "is not a rate"),
        ({"by": "user", "limit": "5/s"}, "rule", 'did you mean "limits"?'),
        ({"limits": "5/s"}, "rule", "by"),
        ({"by": "user", "limits": "5/s", "tiers": {"gold": "5/s"}}, "rule.tiers", "no tier"),
        ({"by": "user", "limits": "5/s", "cost": {"a": {"b": {}}}}, "rule.cost", ""),
    ],
)
async def test_problems_of_a_rule_are_told_by_their_place_in_it(
    admin: Admin, body: Any, where: str, words: str
) -> None:
    """Not by their place in a document that the caller does not see."""
    found = await admin.refused("PUT", "/rules/new", 422, json=body)
    assert any(
        each["where"].startswith(where) and words in each["message"] for each in found["problems"]
    ), found["problems"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/rules/nope", None),
        ("DELETE", "/rules/nope", None),
        ("PUT", "/rules/new?before=nope", {"by": "tenant", "limits": "5/s"}),
    ],
)
async def test_a_rule_that_is_not_there(admin: Admin, method: str, path: str, body: Any) -> None:
    """404, with its name."""
    found = await admin.refused(method, path, 404, json=body)
    assert "there is no rule 'nope'" in found["detail"]


async def test_a_rule_has_the_id_of_its_url(admin: Admin) -> None:
    """Another one in the body is a mistake."""
    body = {"id": "b", "by": "user", "limits": "5/s"}
    found = await admin.refused("PUT", "/rules/a", 422, json=body)
    assert "the body is rule 'b', and the URL names 'a'" in found["detail"]


async def test_a_rule_that_an_override_is_about_stays(admin: Admin) -> None:
    """422: the document would not be right without it."""
    body = {"for": {"user": "9"}, "rule": "login", "multiply": 2}
    await admin.ask("POST", "/overrides", json=body)
    found = await admin.refused("DELETE", "/rules/login", 422)
    assert [each["where"] for each in found["problems"]] == ["overrides[0].rule"]


# ---------------------------------------------------------------------------------- from a file


async def test_rules_of_a_file_are_read_and_not_changed(from_file: Admin) -> None:
    """Reads come from the limiter; every change says where the rules are, and what to do."""
    answer = await from_file.ask("GET", "/rules")
    assert from_data(answer.json()) == read(RULES)
    etag = answer.headers["etag"]
    assert etag == f'"{from_file.node.limiter.rules_status().version}"'
    await from_file.ask("GET", "/rules", 304, headers={"If-None-Match": etag})
    yaml = await from_file.ask("GET", "/rules", headers={"Accept": "text/yaml"})
    assert yaml.text == to_yaml(read(RULES))
    assert (await from_file.ask("POST", "/rules/validate", content=RULES)).json()["safe"]
    rule = {"by": "user", "limits": "5/s"}
    changes: list[tuple[str, str, Any]] = [
        ("PUT", "/rules", {"version": 1}),
        ("PUT", "/rules/orders", rule),
        ("DELETE", "/rules/orders", None),
        ("PUT", "/tiers/pro", {"limits": "5/s"}),
        ("DELETE", "/tiers/pro", None),
        ("PUT", "/assignments/user:1", {"tier": "pro"}),
        ("DELETE", "/assignments/user:42", None),
        ("POST", "/overrides", {"for": {"user": "1"}, "multiply": 2}),
        ("DELETE", "/overrides/user:7", None),
        ("POST", "/lists/deny", {"entry": "x"}),
        ("DELETE", "/lists/allow?entry=10.0.0.0/8", None),
        ("POST", "/versions/1/rollback", None),
        ("GET", "/versions", None),
        ("GET", "/versions/1", None),
        ("GET", "/versions/1/diff", None),
        ("GET", "/audit", None),
    ]
    for method, path, body in changes:
        found = await from_file.refused(method, path, 409, json=body)
        assert found["error"]["code"] == "RULES_FROM_FILE", path
        assert "--rules sqlite:///" in found["detail"]
        assert "limits.yaml" in found["detail"]
