"""The page of `console/rules.py`."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.control.edits import unified_diff
from ratekeeper.service.console import rules
from ratekeeper.service.console.rules import RuleRow, diff_of, rule_change
from tests.service.admin.client import AUTHOR
from tests.service.console.client import ConsoleClient, console_of

PARTIAL = {"HX-Request": "true"}
UNSAFE = (
    "version: 1\nrules:\n- id: orders\n  by: [user]\n  limits: [10/second]\ndeny:\n- 'user:*'\n"
)
SCRIPT = "<script>alert(1)</script>"


async def admin(console: ConsoleClient, method: str, path: str, **more: Any) -> Any:
    """Call the admin API as another operator; return the JSON."""
    headers = {"Authorization": f"Bearer {console.secrets['admin']}", **more.pop("headers", {})}
    answer = await console.http.request(method, f"/v1/admin{path}", headers=headers, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def typed(page: str) -> str:
    """Return what the textarea of a page holds."""
    found = re.search(r"<textarea[^>]*>\n?(.*?)</textarea>", page, re.DOTALL)
    assert found
    return unescape(found[1])


def hidden(page: str, name: str = "etag") -> str:
    """Return the value of a hidden field."""
    found = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert found
    return unescape(found[1])


async def changed(
    console: ConsoleClient, before: str = "10/second", after: str = "11/second"
) -> str:
    """Return the document in force with a change."""
    return typed(await console.get("/rules")).replace(before, after)


async def part(console: ConsoleClient, path: str, text: str, status: int = 200) -> str:
    """Send a draft as htmx does, and return the part of the page."""
    answer = await console.http.post(
        f"/console/rules/{path}",
        data={"document": text},
        headers={**PARTIAL, "X-CSRF-Token": console.csrf},
    )
    assert answer.status_code == status, answer.text
    assert "<html" not in answer.text
    return answer.text


# ── The editor ─────────────────────────────────────────────────────────────────────────────────


async def test_the_editor_holds_the_document_in_force(console: ConsoleClient) -> None:
    """With the ETag for its change, and the author of the version."""
    page = await console.get("/rules")
    assert "- id: orders" in typed(page)
    assert hidden(page) == '"v1"'
    assert f"Version 1</a> by {AUTHOR}" in page
    assert 'name="force"' not in page


async def test_a_problem_is_shown_at_its_line(console: ConsoleClient) -> None:
    """The part for htmx has the line and column that the editor marks."""
    found = await part(console, "check", "version: 1\nrules:\n- id: a\n  by: [user]\n  rate: 1/s\n")
    assert 'data-line="5" data-column="3" data-severity="error"' in found
    assert "Not valid: 2 problems" in found
    assert '<div id="diff" hx-swap-oob="true">' in found
    assert "Not valid" in await part(console, "check", "  \n")


async def test_a_finding_is_shown_at_its_line(console: ConsoleClient) -> None:
    """Unsafe changes and advice have lines, too."""
    found = await part(console, "check", UNSAFE)
    assert 'data-line="7" data-severity="warning"' in found
    assert "Valid, but unsafe: 1 finding" in found
    users = "- {id: users, by: user, limits: 5/s}\n- {id: clients, by: ip, limits: 5/s}\n"
    advice = await part(console, "check", f"version: 1\nrules:\n{users}")
    assert 'data-line="3" data-severity="info"' in advice


async def test_the_difference_to_the_rules_in_force(console: ConsoleClient) -> None:
    """Marks and line numbers say what changes; the same rules say so."""
    found = await part(console, "check", await changed(console))
    assert '<td class="mark">−</td>' in found
    assert '<td class="mark">+</td><td><code>  limits: [11/second]</code></td>' in found
    assert "the same as the rules in force" in await part(
        console, "check", typed(await console.get("/rules"))
    )


async def test_without_scripts_the_check_is_a_page(console: ConsoleClient) -> None:
    """It keeps the draft, its ETag and the reason."""
    answer = await console.post(
        "/rules/check", 200, document="version: 2\n", etag='"v1"', reason="why"
    )
    assert typed(answer.text) == "version: 2\n"
    assert (hidden(answer.text), hidden(answer.text, "reason")) == ('"v1"', "why")
    assert "Not valid" in answer.text


async def test_a_draft_that_is_too_large_is_a_problem_in_its_place(console: ConsoleClient) -> None:
    """The part of the page says it, instead of a page inside a page."""
    found = await part(console, "check", "#" * (6 * 2**20), 413)
    assert 'role="alert"' in found


async def test_what_a_draft_would_have_done(console: ConsoleClient) -> None:
    """The recorded decisions are replayed: how many more are denied, by rule and for whom."""
    bearer = {"Authorization": f"Bearer {console.secrets['check']}"}
    for _ in range(6):
        sent = {"endpoint": "/login", "ip": "192.0.2.1", "method": SCRIPT}
        await console.http.post("/v1/check", json=sent, headers=bearer)
    draft = await changed(console, "3/minute", "1/minute")
    assert console.context.recorder
    console.context.recorder._hand_over()  # the timer would do it within a second
    async with asyncio.timeout(60):
        while ">6</dd>" not in (found := await part(console, "preview", draft)):
            pass
    page = unescape(" ".join(found.split()))
    assert "2 more</strong> requests denied of 6: 3 under the rules in force, 5 under" in page
    assert "ip:192.0.2.1" in page
    assert "100.0 % of the decisions have the recorded outcome" in page
    assert 'data-width="60.0"' in found
    assert SCRIPT in page
    assert SCRIPT not in found
    whole = await console.post("/rules/preview", 200, document=draft, etag='"v1"', period="week")
    assert '<option value="week" selected>' in whole.text
    assert "2 more</strong>" in whole.text
    assert typed(whole.text) == draft


async def test_a_draft_that_cannot_be_replayed(console: ConsoleClient) -> None:
    """The part of the page says why: nothing recorded, invalid, another preview, no records."""
    draft = await changed(console)
    assert "No decision was recorded" in await part(console, "preview", draft)
    assert "The draft is not valid" in await part(console, "preview", "version: 2\n")
    assert console.context.control
    async with console.context.control.previewing:
        assert "another preview" in await part(console, "preview", draft)
    console.context.recorder, recorder = None, console.context.recorder
    assert "records no decisions" in await part(console, "preview", draft)
    console.context.recorder = recorder


async def test_a_draft_is_applied_with_a_reason(console: ConsoleClient) -> None:
    """It is a new version by the operator."""
    text = await changed(console)
    answer = await console.post("/rules", document=text, etag='"v1"', reason="größer\nnow")
    assert answer.headers["location"] == "/console/rules?done=applied"
    version = await admin(console, "GET", "/versions/2")
    assert (version["author"], version["reason"]) == ("admin-token", "größer now")
    page = await console.get("/rules?done=applied")
    assert "11/second" in typed(page)
    assert "data-done" in page
    again = await console.post("/rules", document=text, etag='"v2"', reason="again")
    assert again.headers["location"] == "/console/rules?done=unchanged"


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"reason": " "}, 400, "Give a reason"),
        ({"document": "version: 1\nrules: 3\n"}, 422, "The draft is not valid"),
        ({"document": ""}, 422, "the document is empty"),
        ({"etag": "nonsense"}, 400, "is not a list of ETags"),
        ({"reason": "x" * 1001}, 400, "reason"),
    ],
)
async def test_a_rejected_draft_is_kept(
    console: ConsoleClient, fields: dict[str, str], status: int, text: str
) -> None:
    """The page shows why, with the request ID, and everything that was typed."""
    sent = {"document": await changed(console), "etag": '"v1"', "reason": "why", **fields}
    answer = await console.post("/rules", status, **sent)
    assert text in answer.text
    assert "Request ID" in answer.text
    assert typed(answer.text) == sent["document"]
    assert hidden(answer.text, "reason") == sent["reason"].strip()
    assert "data-posted" in answer.text
    assert 'name="force"' not in answer.text


async def test_an_unsafe_change_can_be_forced_after_it_was_rejected(console: ConsoleClient) -> None:
    """Only then does the page offer it, with the findings."""
    sent = {"document": UNSAFE, "etag": '"v1"', "reason": "all must go"}
    answer = await console.post("/rules", 409, **sent)
    assert 'name="force" value="yes">' in answer.text
    assert "every request with user is denied" in unescape(answer.text)
    await console.post("/rules", **sent, force="yes")
    assert (await admin(console, "GET", "/audit"))["items"][0]["forced"]


async def test_a_conflict_loses_nothing(console: ConsoleClient) -> None:
    """The page shows the change of the other operator; the draft can be applied over it."""
    mine = await changed(console)
    await admin(
        console,
        "PATCH",
        "/rules/login",
        json={"limits": ["4/minute"]},
        headers={"X-Reason": f"theirs {SCRIPT}"},
    )
    sent = {"document": mine, "etag": '"v1"', "reason": "mine"}
    answer = await console.post("/rules", 412, **sent)
    page = unescape(answer.text)
    assert "The rules were changed while you were editing" in page
    assert "admin-token" in page
    assert f"theirs {SCRIPT}" in page
    assert SCRIPT not in answer.text
    assert "4/minute" in page
    assert typed(answer.text) == mine
    assert hidden(answer.text) == '"v1"'
    assert hidden(answer.text, "over") == '"v2"'
    await admin(console, "PATCH", "/rules/login", json={"limits": ["5/minute"]})
    again = await console.post("/rules", 412, **sent, over='"v2"')
    assert hidden(again.text, "over") == '"v3"'
    await console.post("/rules", **sent, over='"v3"')
    assert (await admin(console, "GET", "/rules/login"))["limits"] == ["3/minute"]


async def test_a_conflict_with_a_version_that_is_gone(console: ConsoleClient) -> None:
    """After the database was restored, the draft can still be applied."""
    sent = {"document": await changed(console), "etag": '"v9"', "reason": "mine"}
    answer = await console.post("/rules", 412, **sent)
    assert "The version that you opened does not exist any more" in answer.text
    assert typed(answer.text) == sent["document"]
    await console.post("/rules", **sent, over=hidden(answer.text, "over"))


async def test_a_conflict_of_an_unsafe_change_can_be_forced(console: ConsoleClient) -> None:
    """Each rejection keeps what the one before has asked, so the operator reaches the end."""
    await admin(console, "PATCH", "/rules/login", json={"limits": ["4/minute"]})
    sent = {"document": UNSAFE, "etag": '"v1"', "reason": "all must go"}
    assert hidden((await console.post("/rules", 412, **sent)).text, "over") == '"v2"'
    answer = await console.post("/rules", 409, **sent, over='"v2"')
    assert 'name="force" value="yes">' in answer.text
    assert hidden(answer.text, "over") == '"v2"'
    await admin(console, "PATCH", "/rules/login", json={"limits": ["5/minute"]})
    again = await console.post("/rules", 412, **sent, over='"v2"', force="yes")
    assert 'name="force" value="yes" checked>' in again.text
    without = await console.post("/rules", 400, **{**sent, "reason": ""}, over='"v3"', force="yes")
    assert hidden(without.text, "over") == '"v3"'
    await console.post("/rules", **sent, over='"v3"', force="yes")


# ── Readers, and rules from a file ─────────────────────────────────────────────────────────────


async def test_a_reader_sees_everything_and_changes_nothing(console: ConsoleClient) -> None:
    """Not even with forms made by hand."""
    text = await changed(console)
    await console.post("/rules", document=text, etag='"v1"', reason="a second version")
    await console.log_in("read")
    for path in ("", "/list", "/rule?id=orders", "/versions", "/versions/1"):
        page = await console.get(f"/rules{path}")
        assert 'name="reason"' not in page
    assert "Valid" in await part(console, "check", text)
    made = {"reason": "x", "etag": '"v2"'}
    await console.post("/rules", 403, document=UNSAFE, **made)
    await console.post("/rules/rule", 403, id="orders", mode="off", **made)
    answer = await console.post("/rules/versions/1/rollback", 403, **made)
    assert "the role" in answer.text
    assert (await admin(console, "GET", "/versions"))["items"][0]["number"] == 2


async def test_rules_from_a_file_are_changed_in_the_file(tmp_path: Path) -> None:
    """The pages say what to do, and offer no change; a draft can still be checked."""
    async with console_of(tmp_path, None) as console:
        await console.log_in()
        for path in ("", "/list", "/rule?id=orders", "/versions"):
            page = await console.get(f"/rules{path}")
            assert "These rules come from a file" in page
            assert "--rules sqlite:///rules.db" in page
            assert 'name="reason"' not in page
        text = await changed(console)
        assert "11/second" in await part(console, "check", text)
        answer = await console.post("/rules", 409, document=text, etag='"v1"', reason="why")
        assert typed(answer.text) == text
        await console.post("/rules/rule", 409, id="orders", mode="off", reason="why", etag='"v1"')
        await console.get("/rules/versions/1", 409)


# ── Single rules ───────────────────────────────────────────────────────────────────────────────


async def test_the_list_of_rules(console: ConsoleClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters and pages are in the URL."""
    page = await console.get("/rules/list")
    assert "2 of 2 rules" in page
    assert "pro: 20/second" in page
    assert "endpoint: /login" in page
    assert "1 of 2 rules" in await console.get("/rules/list?q=LOGIN")
    assert "None of the 2 rules matches" in await console.get("/rules/list?mode=shadow")
    monkeypatch.setattr(rules, "RULES_PER_PAGE", 1)
    first = await console.get("/rules/list?mode=enforce")
    assert 'href="/console/rules/list?mode=enforce&amp;offset=1"' in first
    second = await console.get("/rules/list?offset=1")
    assert 'id=login">' in second
    assert 'id=orders">' not in second
    assert "orders" in await console.get("/rules/list?offset=-1")


async def test_shadow_mode_rollout_and_promotion(console: ConsoleClient) -> None:
    """Each is a version of its kind, with the reason."""
    form = {"id": "login", "etag": '"v1"'}
    await console.post("/rules/rule", **form, mode="shadow", reason="try it")
    page = await console.get("/rules/rule?id=login")
    assert "It counts, and denies nothing" in page
    form["etag"] = hidden(page)
    await console.post("/rules/rule", **form, rollout="25", reason="a quarter")
    form["etag"] = '"v3"'
    done = await console.post("/rules/rule", **form, mode="enforce", reason="it works")
    assert done.headers["location"] == "/console/rules/rule?id=login&done=promoted"
    same = await console.post("/rules/rule", **form, mode="enforce", reason="again")
    assert same.headers["location"].endswith("done=unchanged")
    versions = (await admin(console, "GET", "/versions"))["items"]
    assert [(each["kind"], each["reason"]) for each in versions[:3]] == [
        ("promote", "it works"),
        ("patch-rule", "a quarter"),
        ("patch-rule", "try it"),
    ]
    rule = await admin(console, "GET", "/rules/login")
    assert (rule.get("mode", "enforce"), rule["rollout"]) == ("enforce", 25)


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"reason": ""}, 400, "Give a reason"),
        ({"mode": SCRIPT}, 400, "enforce, shadow or off"),
        ({"rollout": "101"}, 400, "from 0 to 100"),
        ({"rollout": "-1"}, 400, "from 0 to 100"),
        ({"rollout": "９"}, 400, "from 0 to 100"),
        ({"etag": '"v9"', "rollout": "5"}, 412, "changed meanwhile"),
        ({"etag": "nonsense", "rollout": "5"}, 400, "not a list of ETags"),
        ({"id": "nothing"}, 404, "there is no rule"),
    ],
)
async def test_a_rejected_change_of_a_rule(
    console: ConsoleClient, fields: dict[str, str], status: int, text: str
) -> None:
    """The page says why, and keeps what was typed."""
    sent = {"id": "login", "etag": '"v1"', "reason": "my words", **fields}
    answer = await console.post("/rules/rule", status, **sent)
    assert text in unescape(answer.text)
    assert SCRIPT not in answer.text
    assert status == 404 or f'value="{sent["reason"]}"' in answer.text


async def test_an_unsafe_change_of_a_rule_can_be_forced(console: ConsoleClient) -> None:
    """After the API has rejected it, with its findings."""
    for number, rule in enumerate(("orders", "login"), 1):
        sent = {"id": rule, "etag": f'"v{number}"', "mode": "off", "reason": "stop"}
        if rule == "orders":
            await console.post("/rules/rule", **sent)
    answer = await console.post("/rules/rule", 409, **sent)
    assert "no rule is enforced any more" in answer.text
    assert 'name="force"' in answer.text
    await console.post("/rules/rule", **sent, force="yes")


async def test_an_id_with_every_kind_of_character(console: ConsoleClient) -> None:
    """It is one segment of the path, and text in the page."""
    name = "a/b?c#d é<b>"
    text = await changed(console, "id: login", f"id: '{name}'")
    await console.post("/rules", document=text, etag='"v1"', reason="rename")
    page = await console.get("/rules/list")
    assert "<b>" not in page
    link = re.search(r'href="/console(/rules/rule\?id=a[^"]+)"', page)
    assert link
    assert f"Rule {name}" in unescape(await console.get(unescape(link[1])))
    await console.post("/rules/rule", id=name, etag='"v2"', mode="shadow", reason="why")


@pytest.mark.parametrize(
    ("rule", "mode", "rollout", "call"),
    [
        ({}, "enforce", 100, None),
        ({"mode": "shadow"}, "enforce", 100, ("POST", "/rules/a/promote", {}, "promoted")),
        ({"replaces": "b"}, "shadow", 100, ("POST", "/rules/a/demote", {}, "demoted")),
        ({}, "shadow", 100, ("PATCH", "/rules/a", {"mode": "shadow"}, "applied")),
        ({"mode": "off"}, "enforce", 100, ("PATCH", "/rules/a", {"mode": "enforce"}, "applied")),
        ({"rollout": 5}, "enforce", 6, ("PATCH", "/rules/a", {"rollout": 6}, "applied")),
        (
            {"mode": "shadow"},
            "enforce",
            6,
            ("PATCH", "/rules/a", {"mode": "enforce", "rollout": 6}, "applied"),
        ),
    ],
)
def test_the_call_that_changes_a_rule(
    rule: dict[str, Any], mode: str, rollout: int, call: tuple[Any, ...] | None
) -> None:
    """A promotion and its reverse are calls of their own; all else is a patch."""
    assert rule_change({"id": "a", **rule}, mode, rollout) == call


def test_the_row_of_a_rule() -> None:
    """Limits of tiers and keys are named, with and without a consistency of their own."""
    row = RuleRow.of(
        {
            "id": "a",
            "by": ["user", "ip"],
            "match": {"endpoint": ["/a", "/b"], "attributes": {"plan": "x"}},
            "limits": ["1/s", {"limit": 5, "per": "90s", "algorithm": "fixed_window"}],
            "tiers": {"pro": {"limits": ["2/s"], "consistency": "eventual"}},
            "keys": {"k*": ["3/s"]},
        }
    )
    assert row.limits == ["1/s", "5/90s, algorithm fixed_window", "pro: 2/s", "k*: 3/s"]
    assert row.match == ["endpoint: /a, /b", "attributes.plan: x"]
    assert (row.by, row.mode, row.rollout) == ("user, ip", "enforce", 100)


# ── Versions ───────────────────────────────────────────────────────────────────────────────────


async def test_versions_and_rolling_back(
    console: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is shown with its changes; its rules are put in force again."""
    await console.post("/rules", document=await changed(console), etag='"v1"', reason=SCRIPT)
    page = await console.get("/rules/versions")
    assert SCRIPT in unescape(page)
    assert SCRIPT not in page
    assert "in force" in page
    version = await console.get("/rules/versions/2")
    assert "[11/second]" in version
    assert "Roll back to" not in version
    text = await console.http.get("/console/rules/versions/2/document")
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert "limits: [11/second]" in text.text
    back = await console.get("/rules/versions/1?against=2")
    assert "From version 2 to version 1" in back
    assert "Roll back to version 1" in back
    await console.post("/rules/versions/1/rollback", 400, reason=" ")
    done = await console.post("/rules/versions/1/rollback", reason="it denied too much")
    assert done.headers["location"] == "/console/rules?done=rolled-back"
    newest = (await admin(console, "GET", "/versions"))["items"][0]
    assert (newest["kind"], newest["reason"]) == ("rollback", "it denied too much")
    assert "10/second" in typed(await console.get("/rules"))
    monkeypatch.setattr(rules, "VERSIONS_PER_PAGE", 1)
    older = await console.get("/rules/versions?before=3")
    assert "Version 2</a>" in older
    assert "before=2" in older
    assert "There are no older versions" in await console.get("/rules/versions?before=1")


async def test_a_roll_back_undoes_no_change_that_was_not_seen(console: ConsoleClient) -> None:
    """Another operator made a version after the page was opened: it stays in force."""
    for etag, after in (('"v1"', "11/second"), ('"v2"', "12/second")):
        text = await changed(console, "11/second" if etag == '"v2"' else "10/second", after)
        await console.post("/rules", document=text, etag=etag, reason="why")
    seen = {"reason": "too strict", "etag": '"v2"'}
    answer = await console.post("/rules/versions/1/rollback", 412, **seen)
    assert "The rules were changed meanwhile" in answer.text
    assert 'value="too strict"' in answer.text
    assert """name="etag" value='"v3"'""" in answer.text
    assert (await admin(console, "GET", "/versions"))["items"][0]["number"] == 3


async def test_a_version_that_does_not_exist(console: ConsoleClient) -> None:
    """Its page and its roll-back are not found."""
    await console.get("/rules/versions/9", 404)
    await console.post("/rules/versions/9/rollback", 404, reason="why")


# ── Diffs ──────────────────────────────────────────────────────────────────────────────────────

_LINES = st.lists(
    st.sampled_from(["", "a", "- b", "-- c", "++ d", "@@ -1 +1 @@", "+"]), max_size=12
)


@given(_LINES, _LINES)
def test_a_diff_says_what_was_added_and_removed(old: list[str], new: list[str]) -> None:
    """Each line has the number that it has in its document, whatever it looks like."""
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (old, new))
    diff = diff_of(unified_diff(before, after, "old", "new"))
    for line in diff.lines:
        if line.mark == "…":
            continue
        assert line.before is None or old[line.before - 1] == line.text
        assert line.after is None or new[line.after - 1] == line.text
        assert (line.before is None, line.after is None) == (line.mark == "+", line.mark == "−")
    kept = sum(1 for line in diff.lines if not line.mark)
    assert diff.added == len([line for line in diff.lines if line.mark == "+"])
    assert len(new) - len(old) == diff.added - diff.removed
    assert kept <= min(len(old), len(new))
    assert diff.left_out == 0


def test_a_long_diff_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says how many lines it leaves out; the counts are those of the whole diff."""
    monkeypatch.setattr(rules, "DIFF_LINES_MAX", 3)
    diff = diff_of(unified_diff("", "a\nb\nc\nd\n", "old", "new"))
    assert (len(diff.lines), diff.added, diff.left_out) == (3, 4, 2)
