"""The rule document, single rules, and versions over HTTP."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.rules.document.grammar import to_data
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import from_data, read
from ratekeeper.rules.document.writing import to_yaml
from ratekeeper.service.admin.control import (
    HEAVY_ENTRIES,
    HEAVY_LENGTH,
    HEAVY_OF_TOKEN_MAX,
    HeavyWork,
)
from ratekeeper.service.admin.rules import merged
from ratekeeper.service.http.tokens import Token
from ratekeeper.testing import ManualClock
from tests.regions.stores import two_regions
from tests.service.admin.client import AUTHOR, RULES, Admin, admin, admin_of, from_file, template

__all__ = ["admin", "from_file", "template"]  # fixtures, found by name

YAML = {"Content-Type": "application/yaml"}
OTHER = RULES.replace("10/second", "11/second")


@pytest.fixture
async def regional(tmp_path: Path, template: Path) -> AsyncIterator[Admin]:
    """Yield the admin API of a node that is in one of two regions."""
    path = tmp_path / "rules.db"
    shutil.copyfile(template, path)
    store, _, _ = two_regions(ManualClock())
    async with admin_of(tmp_path, read(RULES), f"sqlite:///{path}", store=store) as found:
        yield found
    store.close()


async def document(admin: Admin) -> Document:
    """Return the rules in force, from the API."""
    return from_data((await admin.call("GET", "/rules")).json())


async def test_the_document_is_read_as_json_or_yaml(admin: Admin) -> None:
    """Both are the same document, with the version as ETag and a Vary header."""
    as_json = await admin.call("GET", "/rules")
    as_yaml = await admin.call("GET", "/rules", headers={"Accept": "application/yaml"})
    assert as_json.headers["content-type"] == "application/json"
    assert as_yaml.headers["content-type"] == "application/yaml"
    assert from_data(as_json.json()) == read(as_yaml.text) == read(RULES)
    assert as_json.headers["etag"] == as_yaml.headers["etag"] == '"v1"'
    assert as_json.headers["vary"] == "Accept"


@pytest.mark.parametrize("path", ["/rules", "/rules/orders", "/tiers", "/tiers/pro", "/lists/deny"])
async def test_the_newest_version_is_304(admin: Admin, path: str) -> None:
    """Without a body, whatever the form of the tag; otherwise the whole document."""
    for known in ('"v1"', 'W/"v1"', '"v0", "v1"', "*"):
        answer = await admin.call("GET", path, 304, headers={"If-None-Match": known})
        assert answer.content == b""
        assert answer.headers["etag"] == '"v1"'
    await admin.call("GET", path, 200, headers={"If-None-Match": '"v0"'})


@pytest.mark.parametrize("kind", ["application/yaml", "text/yaml", "application/json", None])
async def test_a_document_is_applied_as_yaml_or_json(admin: Admin, kind: str | None) -> None:
    """It is the next version, with the token's name, and can be read at once."""
    content = str(to_data(read(OTHER))).replace("'", '"') if kind == "application/json" else OTHER
    headers = {"X-Reason": "more", **({"Content-Type": kind} if kind else {})}
    answer = await admin.call("PUT", "/rules", content=content.encode(), headers=headers)
    version = answer.json()
    assert (version["number"], version["base"], version["kind"]) == (2, 1, "apply")
    assert (version["author"], version["reason"]) == ("admin-token", "more")
    assert answer.headers["etag"] == '"v2"'
    assert await document(admin) == read(OTHER)


async def test_a_change_of_another_version_is_412(admin: Admin) -> None:
    """The ETag has the newest version; with that one, the change succeeds."""
    stale = {**YAML, "If-Match": '"v7"'}
    answer = await admin.call("PUT", "/rules", 412, content=OTHER, headers=stale)
    assert answer.headers["etag"] == '"v1"'
    assert answer.json()["current"] == 1
    for header in ('W/"v1"', '"other"'):
        await admin.rejected("PUT", "/rules", 412, content=OTHER, headers={"If-Match": header})
    await admin.rejected("PUT", "/rules", 412, content=OTHER, headers={"If-None-Match": "*"})
    assert await document(admin) == read(RULES)
    fresh = {**YAML, "If-Match": answer.headers["etag"]}
    assert (await admin.call("PUT", "/rules", content=OTHER, headers=fresh)).json()["number"] == 2


async def test_one_of_several_versions_may_be_expected(admin: Admin) -> None:
    """`*` matches any version."""
    for number, header in enumerate(('"v1", "v9"', "*"), start=2):
        content = RULES.replace("10/second", f"{number}/second")
        answer = await admin.call("PUT", "/rules", content=content, headers={"If-Match": header})
        assert answer.json()["number"] == number


async def test_a_document_in_force_changes_nothing(admin: Admin) -> None:
    """A client that missed the reply may repeat the request with its old tag."""
    headers = {**YAML, "If-Match": '"v1"'}
    for _ in range(2):
        answer = await admin.call("PUT", "/rules", content=OTHER, headers=headers)
        assert answer.json()["number"] == 2


async def test_all_problems_of_a_document_are_listed(admin: Admin) -> None:
    """422 with their lines, and nothing has changed."""
    wrong = "version: 1\nrules:\n  - {id: a, by: user, limits: 5/x}\n  - {id: b, limits: 5/s}\n"
    found = await admin.rejected("PUT", "/rules", 422, content=wrong, headers=YAML)
    assert found["error"]["code"] == "INVALID_DOCUMENT"
    places = [(each["where"], each["line"]) for each in found["problems"]]
    assert places == [("rules[0].limits", 3), ("rules[1]", 4)]
    assert (await admin.call("GET", "/rules")).headers["etag"] == '"v1"'


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
async def test_a_hostile_document_is_rejected(
    admin: Admin, content: bytes, status: int, words: str
) -> None:
    """With a 4xx, whatever it contains."""
    found = await admin.rejected("PUT", "/rules", status, content=content, headers=YAML)
    assert words in found["detail"]


async def test_an_unsafe_change_needs_force(admin: Admin) -> None:
    """409 with the findings; with ?force=true it succeeds, and the audit log shows it."""
    unsafe = RULES + "deny: ['user:*']\n"
    found = await admin.rejected("PUT", "/rules", 409, content=unsafe, headers=YAML)
    assert found["error"]["code"] == "UNSAFE_CHANGE"
    assert [each["code"] for each in found["findings"]] == ["denies-all"]
    assert "?force=true" in found["detail"]
    await admin.call("PUT", "/rules?force=true", content=unsafe, headers=YAML)
    entry = (await admin.call("GET", "/audit?limit=1")).json()["items"][0]
    assert "every request with user is denied" in entry["forced"]


@pytest.mark.parametrize(
    "text",
    ['{"version": 1, "rules": [' + "{}," * 350_000 + "{}]}", "[" + "{}," * 350_000 + "{}]"],
    ids=["rules", "root"],
)
async def test_a_document_of_very_many_values_is_not_read_to_its_end(
    admin: Admin, text: str
) -> None:
    """A reader could otherwise fill the memory with a megabyte of `{},{},`."""
    found = (await admin.call("POST", "/rules/validate", content=text)).json()
    (problem,) = found["problems"]
    assert problem["message"] == "the document has more than 300,000 lists and mappings; split it"


async def test_a_document_in_a_request_has_fewer_values_than_one_in_a_file(admin: Admin) -> None:
    """A body has 5 MiB, which is room for fewer values than the 16 MiB of a file."""
    text = "version: 1\ndeny: [" + "a," * 800_000 + "a]"
    found = (
        await admin.call(
            "POST", "/rules/validate", content=text, headers={"Content-Type": "application/yaml"}
        )
    ).json()
    (problem,) = found["problems"]
    assert "more than 800,000 values" in problem["message"]


async def test_a_document_of_ten_thousand_rules_is_validated(admin: Admin) -> None:
    """The bounds leave room for large documents."""
    rules = [
        {"id": f"r{n}", "match": {"endpoint": f"/v1/a{n}/*"}, "by": ["user"], "limits": ["9/s"]}
        for n in range(10_000)
    ]
    found = (
        await admin.call("POST", "/rules/validate", json={"version": 1, "rules": rules})
    ).json()
    assert found["valid"], found["problems"]


async def test_the_requests_of_one_token_that_take_long_wait_in_turn(admin: Admin) -> None:
    """A worker does one at a time; some may wait, one more is 429, and other tokens are served.

    Short documents do not wait.
    """
    long = RULES + "# " + "x" * HEAVY_LENGTH
    heavy = admin.app.state.control.heavy
    reader = {"Authorization": f"Bearer {admin.secrets['read']}"}

    def ask(path: str, headers: dict[str, str]) -> asyncio.Task[httpx.Response]:
        method, content = ("POST", long) if path == "/rules/validate" else ("GET", None)
        url = f"/v1/admin{path}"
        return asyncio.create_task(
            admin.client.request(method, url, content=content, headers=headers)
        )

    async with heavy.turn(Token("other", "read")):
        waiting = [ask("/rules/validate", reader) for _ in range(HEAVY_OF_TOKEN_MAX)]
        while heavy.asked_by("read-token") < HEAVY_OF_TOKEN_MAX:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)
        await admin.call("POST", "/rules/validate", content=RULES, headers=reader)
        await admin.call("GET", "/rules", headers=reader)
        for path in ("/rules/validate", "/versions/1/diff"):
            busy = await ask(path, reader)
            assert (busy.status_code, busy.headers["retry-after"]) == (429, "1"), path
            assert busy.json()["error"]["code"] == "BUSY"
        own = ask("/rules/validate", {"Authorization": f"Bearer {admin.secrets['admin']}"})
    assert [each.status_code for each in await asyncio.gather(*waiting, own)] == [200] * 4


async def test_questions_about_a_long_document_wait_in_turn(admin: Admin) -> None:
    """Listing subjects takes long with a long document only."""
    reader = {"Authorization": f"Bearer {admin.secrets['read']}"}
    heavy = admin.app.state.control.heavy

    async def statuses() -> list[int]:
        paths = ("/lists/deny", "/assignments")
        calls = [admin.client.get(f"/v1/admin{path}", headers=reader) for path in paths]
        return [(await each).status_code for each in calls]

    async def ask_beside() -> list[int]:
        token = Token("read-token", "read")
        async with heavy.turn(token):
            others = [asyncio.create_task(_turn(heavy, token)) for _ in range(2)]
            while heavy.asked_by(token.name) < HEAVY_OF_TOKEN_MAX:  # noqa: ASYNC110 - see above
                await asyncio.sleep(0)
            found = await statuses()
        await asyncio.gather(*others)
        return found

    assert await ask_beside() == [200, 200]
    deny = "\n".join(["deny:", *(f"  - user:bad{n}" for n in range(HEAVY_ENTRIES))])
    await admin.call("PUT", "/rules", content=f"{RULES.rstrip()}\n{deny}\n")
    assert await statuses() == [200, 200]
    assert await ask_beside() == [429, 429]


async def _turn(heavy: HeavyWork, token: Token) -> None:
    async with heavy.turn(token):
        pass


async def test_a_document_is_validated_without_being_applied(admin: Admin) -> None:
    """Problems, findings and the diff."""
    same = (await admin.call("POST", "/rules/validate", content=RULES)).json()
    advice = same.pop("findings")
    assert same == {"valid": True, "safe": True, "problems": [], "diff": ""}
    assert [(each["code"], each["where"], each["is_advice"]) for each in advice] == [
        ("absent-attribute", "rules[0].by", True),
    ]
    unsafe = (
        await admin.call("POST", "/rules/validate", content=RULES + "deny: ['user:*']\n")
    ).json()
    assert (unsafe["valid"], unsafe["safe"]) == (True, False)
    assert [(each["code"], each["line"]) for each in unsafe["findings"]] == [
        ("denies-all", 10),
        ("absent-attribute", 5),
    ]
    assert "--- v1\n+++ <body>\n" in unsafe["diff"]
    wrong = (await admin.call("POST", "/rules/validate", content="version: 2")).json()
    assert (wrong["valid"], wrong["safe"]) == (False, False)
    assert [each["where"] for each in wrong["problems"]] == ["version"]
    assert (await admin.call("GET", "/rules")).headers["etag"] == '"v1"'


GLOBAL = {"id": "plan", "by": "user", "limits": "9/minute", "scope": "global"}
LEASED = {"id": "plan", "by": "user", "limits": "9/minute", "consistency": "leased"}


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (GLOBAL, "rule plan: scope: global does not work without regions"),
        (LEASED, "rule plan: consistency: leased does not work here"),
    ],
)
async def test_rules_that_the_service_cannot_use_are_rejected(
    admin: Admin, rule: dict[str, str], says: str
) -> None:
    """Its workers would keep the old ones. Force does not help, and no way makes a version."""
    whole = {"version": 1, "rules": [rule]}
    one = {name: value for name, value in rule.items() if name != "id"}
    newest = {"If-Match": '"v1"'}
    for path, body, headers in (
        ("/rules?force=true", whole, {}),
        ("/rules?force=true", whole, newest),
        ("/rules/plan", one, {}),
    ):
        problem = await admin.rejected("PUT", path, 409, json=body, headers=headers)
        assert problem["error"]["code"] == "UNUSABLE_RULES"
        assert says in problem["detail"]
    checked = (await admin.call("POST", "/rules/validate", json=whole)).json()
    assert (checked["valid"], says in checked["problems"][0]["message"]) == (False, True)
    assert (await admin.call("GET", "/rules")).headers["etag"] == '"v1"'


async def test_no_rollback_to_rules_that_the_service_cannot_use(admin: Admin) -> None:
    """Such a version was written by the command line, or by a service with regions."""
    repository = await admin.app.state.control.repository()
    for version, rules in enumerate(([GLOBAL], [])):
        document = from_data({"version": 1, "rules": rules})
        await repository.apply(document, author="x", expected=version + 1, force=True)
    problem = await admin.rejected("POST", "/versions/2/rollback", 409)
    assert problem["error"]["code"] == "UNUSABLE_RULES"
    await admin.call("POST", "/versions/1/rollback")


async def test_a_service_with_regions_takes_global_rules(regional: Admin) -> None:
    """Except an exact limit of less than one unit for a region."""
    one = {"by": "tenant", "limits": "1/minute", "scope": "global"}
    await regional.call("PUT", "/rules/plan", json=one)
    exact = {**one, "across_regions": "exact"}
    problem = await regional.rejected("PUT", "/rules/plan", 409, json=exact)
    assert "less than one unit" in problem["detail"]


# ── One rule ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_rule_is_read_replaced_and_deleted(admin: Admin) -> None:
    """The other rules keep their content and order."""
    orders = (await admin.call("GET", "/rules/orders")).json()
    assert orders == to_data(read(RULES))["rules"][0]
    await admin.call("PUT", "/rules/orders", json={**orders, "limits": ["99/second"]})
    await admin.call("PUT", "/rules/search", json={"by": ["tenant"], "limits": "5/second"})
    assert [rule.id for rule in (await document(admin)).rules] == ["orders", "login", "search"]
    moved = {"by": ["tenant"], "limits": "6/second"}
    await admin.call("PUT", "/rules/search?before=orders", json=moved)
    assert [rule.id for rule in (await document(admin)).rules] == ["search", "orders", "login"]
    assert (await admin.call("DELETE", "/rules/login")).json()["kind"] == "remove-rule"
    assert [rule.id for rule in (await document(admin)).rules] == ["search", "orders"]


async def test_a_rule_id_may_be_any_name(admin: Admin) -> None:
    """With slashes and spaces, percent-encoded; `validate` is valid too."""
    for name, path in (("a/b c%", "a%2Fb%20c%25"), ("validate", "validate")):
        await admin.call("PUT", f"/rules/{path}", json={"by": ["tenant"], "limits": "5/second"})
        assert (await admin.call("GET", f"/rules/{path}")).json()["id"] == name
        await admin.call("DELETE", f"/rules/{path}")


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
async def test_problems_of_a_rule_have_places_in_the_rule(
    admin: Admin, body: Any, where: str, words: str
) -> None:
    """The caller does not see the document around it."""
    found = await admin.rejected("PUT", "/rules/new", 422, json=body)
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
async def test_an_unknown_rule_is_404(admin: Admin, method: str, path: str, body: Any) -> None:
    """The detail has its ID."""
    found = await admin.rejected(method, path, 404, json=body)
    assert "there is no rule 'nope'" in found["detail"]


async def test_a_rule_has_the_id_of_its_url(admin: Admin) -> None:
    """Another ID in the body is an error."""
    body = {"id": "b", "by": "user", "limits": "5/s"}
    found = await admin.rejected("PUT", "/rules/a", 400, json=body)
    assert "the body is rule 'b', and the URL names 'a'" in found["detail"]


async def test_a_rule_with_an_override_cannot_be_removed(admin: Admin) -> None:
    """422: the document would be invalid without it."""
    document = (await admin.call("GET", "/rules")).json()
    document["overrides"] = [{"for": {"user": "9"}, "rule": "login", "multiply": 2}]
    await admin.call("PUT", "/rules", json=document)
    found = await admin.rejected("DELETE", "/rules/login", 422)
    assert [each["where"] for each in found["problems"]] == ["overrides[0].rule"]


# ── From a file ──────────────────────────────────────────────────────────────────────────────────


async def test_comments_survive_an_apply(admin: Admin) -> None:
    """GET returns the text of the operator; validate and versions show the change of comments."""
    text = RULES.strip().replace("version: 1", "version: 1  # of the shop") + "\n"
    headers = {"Content-Type": "application/yaml"}
    checked = (await admin.call("POST", "/rules/validate", content=text, headers=headers)).json()
    assert "+version: 1  # of the shop" in checked["diff"]
    made = (await admin.call("PUT", "/rules", content=text, headers=headers)).json()
    assert made["number"] == 2
    kept = await admin.call("GET", "/rules", headers={"Accept": "application/yaml"})
    assert kept.text == text
    again = await admin.call("PUT", "/rules", content=text, headers=headers)
    assert again.json()["number"] == 2
    # The same rules as JSON have no comments to keep, and remove none.
    data = (await admin.call("GET", "/rules")).json()
    assert (await admin.call("PUT", "/rules", json=data)).json()["number"] == 2
    assert not (await admin.call("POST", "/rules/validate", json=data)).json()["diff"]
    await admin.call("PATCH", "/rules/orders", json={"rollout": 50})
    diff = (await admin.call("GET", "/versions/3/diff")).json()["diff"]
    changed = [line for line in diff.splitlines()[2:] if line[0] in "+-"]
    assert changed == ["+  rollout: 50"]


async def test_rules_from_a_file_cannot_be_changed(from_file: Admin) -> None:
    """They are read from the limiter; each change is rejected with the name of the file."""
    answer = await from_file.call("GET", "/rules")
    assert from_data(answer.json()) == read(RULES)
    etag = answer.headers["etag"]
    assert etag == f'"{from_file.context.limiter.rules_status().version}"'
    await from_file.call("GET", "/rules", 304, headers={"If-None-Match": etag})
    yaml = await from_file.call("GET", "/rules", headers={"Accept": "text/yaml"})
    assert yaml.text == to_yaml(read(RULES))
    assert (await from_file.call("POST", "/rules/validate", content=RULES)).json()["safe"]
    rule = {"by": "user", "limits": "5/s"}
    changes: list[tuple[str, str, Any]] = [
        ("PUT", "/rules", {"version": 1}),
        ("PUT", "/rules/orders", rule),
        ("PATCH", "/rules/orders", {"limits": "5/s"}),
        ("DELETE", "/rules/orders", None),
        ("PUT", "/tiers/pro", {"limits": "5/s"}),
        ("DELETE", "/tiers/pro", None),
        ("PUT", "/assignments/user:1", {"tier": "pro"}),
        ("DELETE", "/assignments/user:42", None),
        ("POST", "/overrides", {"for": {"user": "1"}, "multiply": 2}),
        ("DELETE", "/overrides/user:7", None),
        ("POST", "/lists/deny", {"entry": "user:x"}),
        ("DELETE", "/lists/allow?entry=10.0.0.0/8", None),
        ("POST", "/versions/1/rollback", None),
        ("GET", "/versions", None),
        ("GET", "/versions/1", None),
        ("GET", "/versions/1/diff", None),
        ("GET", "/audit", None),
    ]
    for method, path, body in changes:
        found = await from_file.rejected(method, path, 409, json=body)
        assert found["error"]["code"] == "RULES_FROM_FILE", path
        assert "--rules sqlite:///" in found["detail"]
        assert "limits.yaml" in found["detail"]


# ── Patches ────────────────────────────────────────────────────────────────────────────────────

MERGE = {"Content-Type": "application/merge-patch+json"}


async def rule(admin: Admin, name: str) -> dict[str, Any]:
    """Return a rule as the API has it."""
    found: dict[str, Any] = (await admin.call("GET", f"/rules/{name}")).json()
    return found


async def test_a_patch_changes_some_fields_of_a_rule(admin: Admin) -> None:
    """Others stay; null removes a field; the rule keeps its place; the audit has the reason."""
    before = await rule(admin, "orders")
    headers = {**MERGE, "X-Reason": "launch", "If-Match": '"v1"'}
    patch = {"limits": ["30/second"], "tiers": {"free": ["2/second"]}}
    made = await admin.call("PATCH", "/rules/orders", json=patch, headers=headers)
    assert (made.headers["etag"], made.json()["kind"]) == ('"v2"', "patch-rule")
    tiers = {**before["tiers"], "free": ["2/second"]}
    assert await rule(admin, "orders") == {**before, "limits": ["30/second"], "tiers": tiers}
    await admin.call("PATCH", "/rules/orders", json={"tiers": None, "id": "orders"})
    after = {name: value for name, value in before.items() if name != "tiers"}
    assert await rule(admin, "orders") == {**after, "limits": ["30/second"]}
    assert [each.id for each in (await document(admin)).rules] == ["orders", "login"]
    entry = (await admin.call("GET", "/audit?limit=2")).json()["items"][1]
    assert (entry["kind"], entry["author"], entry["reason"]) == (
        *("patch-rule", "admin-token"),
        "launch",
    )


async def test_the_scope_of_a_rule_is_edited(regional: Admin) -> None:
    """It is kept by every other edit. A combination that makes no sense is rejected."""
    admin = regional
    shared = {"by": ["tenant"], "limits": ["5/minute"], "scope": "global"}
    await admin.call("PUT", "/rules/shared", json=shared)
    await admin.call("PATCH", "/rules/shared", json={"across_regions": "exact"}, headers=MERGE)
    exact = {"id": "shared", **shared, "across_regions": "exact"}
    assert await rule(admin, "shared") == exact
    await admin.call("PATCH", "/rules/shared", json={"limits": ["6/minute"]}, headers=MERGE)
    assert await rule(admin, "shared") == {**exact, "limits": ["6/minute"]}
    (found,) = [each for each in (await document(admin)).rules if each.id == "shared"]
    assert (found.scope, found.across_regions, found.across) == ("global", "exact", "exact")
    for patch, where in (
        ({"scope": None}, "across_regions"),
        ({"scope": "region"}, "across_regions"),
        ({"consistency": "leased"}, "consistency"),
        ({"scope": "world"}, "scope"),
    ):
        problem = await admin.rejected("PATCH", "/rules/shared", 422, json=patch, headers=MERGE)
        assert problem["problems"][0]["where"] == f"rule.{where}"
    await admin.call(
        "PATCH", "/rules/shared", json={"scope": None, "across_regions": None}, headers=MERGE
    )
    assert "scope" not in await rule(admin, "shared")


async def test_a_tier_of_a_global_rule_stays_strict(regional: Admin) -> None:
    """A tier that a global rule uses cannot be leased."""
    admin = regional
    await admin.call("PUT", "/tiers/default", json={"limits": ["7/minute"]})
    await admin.call("PUT", "/rules/shared", json={"by": ["tenant"], "scope": "global"})
    leased = {"limits": ["7/minute"], "consistency": "leased"}
    problem = await admin.rejected("PUT", "/tiers/default", 422, json=leased)
    assert 'tier "default" is leased, which does not work with scope: global' in str(problem)


async def test_a_patch_that_changes_nothing_makes_no_version(admin: Admin) -> None:
    """An empty patch, or the values that the rule has."""
    for patch in ({}, {"limits": "10/second"}, {"comment": None}):
        assert (await admin.call("PATCH", "/rules/orders", json=patch)).json()["number"] == 1


@pytest.mark.parametrize(
    ("patch", "status", "words"),
    [
        ({"limit": "5/s"}, 422, 'rule: unknown field "limit"; did you mean "limits"?'),
        ({"limits": "ten"}, 422, "rule.limits"),
        ({"limits": None, "tiers": None, "by": None}, 422, '"by" is missing'),
        ({"match": {"endpint": "/a"}}, 422, 'unknown field "endpint"; did you mean "endpoint"?'),
        ({"id": "other"}, 400, "to rename a rule"),
        ({"id": None, "by": 7}, 422, "rule.by"),
        ([{"op": "remove"}], 400, "expected an object, found a list"),
    ],
)
async def test_an_invalid_patch_changes_nothing(
    admin: Admin, patch: Any, status: int, words: str
) -> None:
    """The messages are those of the document."""
    found = await admin.rejected("PATCH", "/rules/orders", status, json=patch)
    assert words in found["detail"]
    assert await document(admin) == read(RULES)


async def test_a_patch_needs_its_rule_and_its_version(admin: Admin) -> None:
    """404 without the rule, 412 for another version, 409 if unsafe, 415 for a JSON Patch."""
    await admin.rejected("PATCH", "/rules/nope", 404, json={})
    stale = {"If-Match": '"v7"'}
    await admin.rejected("PATCH", "/rules/orders", 412, json={"comment": "x"}, headers=stale)
    off = {"mode": "off"}
    await admin.call("PATCH", "/rules/login", json=off)
    found = await admin.rejected("PATCH", "/rules/orders", 409, json=off)
    assert found["error"]["code"] == "UNSAFE_CHANGE"
    await admin.call("PATCH", "/rules/orders?force=true", json=off)
    kind = {"Content-Type": "application/json-patch+json"}
    answer = await admin.call("PATCH", "/rules/orders", 415, content=b"[]", headers=kind)
    assert answer.headers["accept-patch"] == "application/merge-patch+json"


@given(
    data=st.recursive(
        st.none() | st.integers(0, 3) | st.text("ab", max_size=2),
        lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner),
        max_leaves=8,
    )
)
def test_a_merge_patch_has_the_properties_of_rfc_7396(data: Any) -> None:
    """A patch may be repeated; into nothing, it is the value without nulls in objects."""
    value = {"a": {"b": 1}, "c": [None]}
    once = merged(value, data)
    assert merged(once, data) == once
    if not isinstance(data, dict):
        assert once == data
    else:
        assert {name for name in once if name not in data} == value.keys() - data.keys()
        assert not any(data[name] is None for name in once if name in data)
    assert value == {"a": {"b": 1}, "c": [None]}, "the value is unchanged"


# ── Versions ───────────────────────────────────────────────────────────────────────────────────


async def changed(admin: Admin, count: int) -> None:
    """Make more versions, each with another limit of one tier."""
    for number in range(2, count + 2):
        body = {"limits": f"{number}/second", "reason": f"no. {number}"}
        await admin.call("PUT", "/tiers/max", json=body)


@pytest.mark.parametrize(("path", "name"), [("/versions", "number"), ("/audit", "version")])
async def test_versions_and_audit_log_have_pages(admin: Admin, path: str, name: str) -> None:
    """The newest first; following the links gives each entry once."""
    await changed(admin, 4)
    seen: list[int] = []
    url: str | None = f"/v1/admin{path}?limit=2"
    while url is not None:
        page = await admin.client.get(url)
        seen += [each[name] for each in page.json()["items"]]
        link = page.links.get("next")
        assert (link is None) == (page.json()["next"] is None)
        url = link["url"] if link else None
    assert seen == [5, 4, 3, 2, 1]
    whole = await admin.call("GET", f"{path}?limit=5")
    assert (len(whole.json()["items"]), whole.json()["next"]) == (5, None)
    for query in ("limit=0", "limit=201", "before=", "before=x"):
        await admin.rejected("GET", f"{path}?{query}", 400)


async def test_a_version_is_read_with_its_text(admin: Admin) -> None:
    """As it was applied; an unknown number is 404."""
    first = (await admin.call("GET", "/versions/1")).json()
    assert (first["number"], first["author"], first["kind"]) == (1, AUTHOR, "apply")
    assert first["text"] == to_yaml(read(RULES))
    found = await admin.rejected("GET", "/versions/9", 404)
    assert found["detail"] == "there is no version 9; there are 1 to 1"
    for number in ("0", "-1", "x", str(2**31)):
        await admin.rejected("GET", f"/versions/{number}", 400)


async def test_any_two_versions_can_be_compared(admin: Admin) -> None:
    """By default with the previous one; the first is compared with nothing."""
    await changed(admin, 2)
    step = (await admin.call("GET", "/versions/3/diff")).json()
    assert (step["before"], step["after"]) == (2, 3)
    assert "-  max: [2/second]\n+  max: [3/second]" in step["diff"]
    back = (await admin.call("GET", "/versions/2/diff?against=3")).json()["diff"]
    assert "-  max: [3/second]\n+  max: [2/second]" in back
    assert (await admin.call("GET", "/versions/2/diff?against=2")).json()["diff"] == ""
    for query in ("", "?against=0"):
        first = (await admin.call("GET", f"/versions/1/diff{query}")).json()
        assert first["diff"].startswith("--- no version\n+++ version 1\n")
    await admin.rejected("GET", "/versions/2/diff?against=9", 404)
    await admin.rejected("GET", "/versions/9/diff", 404)


async def test_a_rollback_makes_a_new_version(admin: Admin) -> None:
    """With the old text and the reason; it needs no force."""
    unsafe = RULES + "deny: ['user:*']\n"
    await admin.call("PUT", "/rules?force=true", content=unsafe)
    await admin.call("POST", "/versions/1/rollback")
    headers = {"X-Reason": "on purpose", "If-Match": '"v3"'}
    made = await admin.call("POST", "/versions/2/rollback", headers=headers)
    version = made.json()
    assert (version["number"], version["kind"], version["base"]) == (4, "rollback", 3)
    assert (version["author"], version["reason"]) == ("admin-token", "on purpose")
    texts = [(await admin.call("GET", f"/versions/{n}")).json()["text"] for n in (2, 4)]
    assert texts[0] == texts[1]
    await admin.rejected("POST", "/versions/9/rollback", 404)


async def test_a_rollback_has_the_reason_of_its_body(admin: Admin) -> None:
    """The body may be left out; an unknown field is rejected, and nothing has changed."""
    await changed(admin, 2)
    wrong = {"nonsense": 1, "reason": "because"}
    found = await admin.rejected("POST", "/versions/1/rollback", 400, json=wrong)
    assert found["detail"] == 'the body: unknown field "nonsense"; known: "reason"'
    for body in ({"reason": 5}, {"reason": "x" * 1_001}, [], "because"):
        await admin.rejected("POST", "/versions/1/rollback", 400, json=body)
    assert (await admin.call("GET", "/rules")).headers["etag"] == '"v3"'
    made = await admin.call("POST", "/versions/1/rollback", json={"reason": "because"})
    assert (made.json()["number"], made.json()["reason"]) == (4, "because")
    assert (await admin.call("POST", "/versions/2/rollback", json={})).json()["number"] == 5
    entries = (await admin.call("GET", "/audit?limit=2")).json()["items"]
    assert [each["reason"] for each in entries] == ["", "because"]


async def test_a_long_diff_is_cut_in_the_list(admin: Admin) -> None:
    """The diff of one version is complete."""
    rules = [{"id": f"r{n}", "by": ["user"], "limits": ["5/s"]} for n in range(1_000)]
    await admin.call("PUT", "/rules?force=true", json={"version": 1, "rules": rules})
    entry = (await admin.call("GET", "/audit?limit=1")).json()["items"][0]
    whole = (await admin.call("GET", "/versions/2/diff")).json()["diff"]
    assert len(entry["diff"]) == 10_000
    assert whole.startswith(entry["diff"])
    assert len(whole) > 20_000


async def test_the_audit_log_has_authors_and_diffs(admin: Admin) -> None:
    """One entry for each version."""
    await changed(admin, 1)
    entry = (await admin.call("GET", "/audit?limit=1")).json()["items"][0]
    assert (entry["version"], entry["author"], entry["reason"]) == (2, "admin-token", "no. 2")
    assert (entry["kind"], entry["forced"]) == ("set-tier", "")
    assert "+  max: [2/second]" in entry["diff"]


async def test_a_shadow_rule_is_promoted_and_demoted(admin: Admin) -> None:
    """One request each; the audit has the kind and the reason, and the rule its new mode."""
    trial = {"by": "user", "limits": "5/second", "mode": "shadow", "replaces": "orders"}
    await admin.call("PUT", "/rules/a%2Fb", json=trial)
    ids = [rule["id"] for rule in (await admin.call("GET", "/rules")).json()["rules"]]
    assert ids == ["a/b", "orders", "login"]
    made = (await admin.call("POST", "/rules/a%2Fb/promote", json={"reason": "tried"})).json()
    assert (made["kind"], made["reason"]) == ("promote", "tried")
    assert "mode" not in (await admin.call("GET", "/rules/a%2Fb")).json()
    undone = (await admin.call("POST", "/rules/a%2Fb/demote")).json()
    assert (undone["kind"], undone["number"]) == ("demote", made["number"] + 1)
    assert (await admin.call("GET", "/rules/a%2Fb")).json()["mode"] == "shadow"
    await admin.rejected("POST", "/rules/orders/demote", 400)
    await admin.rejected("POST", "/rules/gone/promote", 404)
    await admin.rejected("POST", "/rules/orders/promote", 400, json={"nonsense": 1})
