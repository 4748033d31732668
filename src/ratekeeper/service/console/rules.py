"""The page Rules: the document, a draft and its effect, single rules, and versions.

A draft is text in a form. Each request sends it whole, with the ETag of the rules that the editor
was opened with, and each reply contains it again: neither a mistake nor a conflict loses it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import yaml
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from ratekeeper.service.console.client import YAML, ApiProblem, header_text, segment
from ratekeeper.service.console.views import ROOT, Page, Problem, limit_text, view

# Lines of a diff that a page shows; the first version of a large document is all new.
DIFF_LINES_MAX: Final = 1_000
RULES_PER_PAGE: Final = 50
VERSIONS_PER_PAGE: Final = 25
# The periods whose decisions a preview replays; the first is the usual one.
PERIODS: Final = {
    "hour": ("the last hour", timedelta(hours=1)),
    "day": ("the last 24 hours", timedelta(days=1)),
    "week": ("the last 7 days", timedelta(days=7)),
}
# Versions that a conflict lists.
CONFLICTS_MAX: Final = 10
MODES: Final = {
    "enforce": "enforced",
    "shadow": "in shadow mode",
    "off": "off",
}
NO_REASON: Final = "Give a reason: the audit log and the list of versions show it."
_VERSION: Final = re.compile(r'"v([0-9]{1,10})"')
_CHANGED_MEANWHILE: Final = (
    "The rules were changed meanwhile, so nothing was changed here. The page shows the newest "
    "rules. Check them, and send the form again."
)
_HUNK: Final = re.compile(r"@@ -([0-9]+)(?:,[0-9]+)? \+([0-9]+)(?:,[0-9]+)? @@")


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [
        view("/rules", show),
        view("/rules", apply, "POST"),
        view("/rules/check", check, "POST", changes=False),
        view("/rules/preview", preview, "POST", changes=False),
        view("/rules/list", list_rules),
        view("/rules/rule", show_rule),
        view("/rules/rule", change_rule, "POST"),
        view("/rules/versions", list_versions),
        view("/rules/versions/{number:int}", show_version),
        view("/rules/versions/{number:int}/document", show_document),
        view("/rules/versions/{number:int}/rollback", roll_back, "POST"),
    ]


# ── The editor ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Draft:
    """The contents of the editor."""

    text: str
    etag: str
    """Of the rules that the editor was opened with, in quotes."""
    reason: str = ""

    @classmethod
    def of(cls, form: Mapping[str, str]) -> Draft:
        """Return the draft that a form has sent."""
        return cls(form.get("document", ""), form.get("etag", ""), form.get("reason", "").strip())


async def show(page: Page) -> Response:
    """Show the document in force, in the editor."""
    found = await page.api.call("GET", "/rules", headers={"Accept": YAML})
    return await _editor(page, Draft(found.text, found.headers["etag"]))


async def check(page: Page) -> Response:
    """Show the problems and findings of a draft, and its changes to the rules in force."""
    draft = Draft.of(page.form)
    checked = await _checked(page, draft)
    if page.is_partial:
        return page.render("rules_check.html", checked=checked)
    return await _editor(page, draft, checked=checked)


async def preview(page: Page) -> Response:
    """Show the effect that a draft would have had on the last recorded decisions."""
    draft = Draft.of(page.form)
    found: Any = None
    problem: Problem | None = None
    status = 200
    try:
        _, length = PERIODS.get(page.form.get("period", ""), PERIODS["hour"])
        since = datetime.now(UTC) - length
        answer = await page.api.call(
            "POST", "/rules/preview", query={"from": since.isoformat()}, text=draft.text
        )
        found = answer.json()
    except ApiProblem as error:
        # A draft that cannot be replayed is an answer, and no failure of the request.
        status = error.status if error.status >= 500 else 200
        problem = page.problem(_preview_detail(error))
    if page.is_partial:
        return page.render("rules_preview.html", status, preview=found, problem=problem)
    return await _editor(page, draft, status, preview=found, problem=problem)


def _preview_detail(error: ApiProblem) -> str:
    if error.code == "INVALID_DOCUMENT":
        return "The draft is not valid, so nothing can be replayed. Correct its problems first."
    return error.detail


async def apply(page: Page) -> Response:
    """Apply a draft, or show it again with the reason why it cannot be applied."""
    draft = Draft.of(page.form)
    if not draft.reason:
        return await _rejected(page, draft, 400, problem=page.problem(NO_REASON))
    # `over` is the version that the operator has seen in a conflict and wants to replace.
    expected = page.form.get("over") or draft.etag
    try:
        found = await page.api.call(
            "PUT",
            "/rules",
            query={"force": page.form.get("force") == "yes"},
            text=draft.text,
            headers={"If-Match": expected, "X-Reason": header_text(draft.reason)},
        )
    except ApiProblem as error:
        return await _not_applied(page, draft, error)
    is_new = found.headers["etag"] != expected
    return page.redirect(f"{ROOT}/rules", "applied" if is_new else "unchanged")


async def _not_applied(page: Page, draft: Draft, error: ApiProblem) -> Response:
    if error.code == "VERSION_CONFLICT":
        return await _rejected(page, draft, error.status, error.etag)
    details = {
        "INVALID_DOCUMENT": "The draft is not valid, so nothing was changed. Its problems are "
        "listed below the editor.",
        "UNSAFE_CHANGE": "This change is most likely a mistake, so nothing was changed. Its "
        "findings are listed below the editor. Correct the draft, or apply it anyway.",
    }
    known = error.code in details
    return await _rejected(
        page,
        draft,
        error.status,
        problem=page.problem(details[error.code]) if known else page.problem_of(error),
        checked=await _checked(page, draft) if known else None,
        is_unsafe=error.code == "UNSAFE_CHANGE",
    )


async def _rejected(
    page: Page, draft: Draft, status: int, newest: str = "", **more: Any
) -> Response:
    """Show a draft that was not applied, with the conflict that it has, or had before.

    `newest` is the ETag of the version that is in the way.
    """
    etag = newest or page.form.get("over", "")
    conflict = await _conflict(page, draft, etag) if etag else None
    # An operator who has forced a change already knows that it is unsafe.
    values = {"is_unsafe": page.form.get("force") == "yes", **more}
    return await _editor(page, draft, status, conflict=conflict, **values)


class Conflict(NamedTuple):
    """The changes that other operators made since the editor was opened."""

    etag: str
    """Of the newest version."""
    number: int
    versions: list[dict[str, Any]]
    """The newest first; at most CONFLICTS_MAX."""
    diff: Diff | None
    """None if the version that the editor was opened with does not exist any more."""


async def _conflict(page: Page, draft: Draft, etag: str) -> Conflict:
    base, newest = _number(draft.etag), _number(etag)
    recent = await page.api.get("/versions", limit=CONFLICTS_MAX)
    versions = [each for each in recent["items"] if each["number"] > base]
    try:
        found = await page.api.get(f"/versions/{newest}/diff", against=base)
    except ApiProblem as error:
        # The version that the editor was opened with may be gone: the database was restored.
        if error.status != 404:
            raise
        return Conflict(etag, newest, versions, None)
    diff = await asyncio.to_thread(diff_of, found["diff"])
    return Conflict(etag, newest, versions, diff)


def _number(etag: str) -> int:
    """Return the number of a version; 0 for an ETag that names none."""
    found = _VERSION.fullmatch(etag)
    return int(found[1]) if found else 0


async def _checked(page: Page, draft: Draft) -> dict[str, Any]:
    """Return the validator's reply to a draft, with the lines of the diff. Raises ApiProblem."""
    if not draft.text.strip():
        empty = {"line": 1, "column": 1, "where": "", "message": "the document is empty"}
        return {"valid": False, "safe": False, "problems": [empty], "findings": [], "diff": None}
    found = (await page.api.call("POST", "/rules/validate", text=draft.text)).json()
    return {**found, "diff": await asyncio.to_thread(diff_of, found["diff"])}


async def _editor(page: Page, draft: Draft, status: int = 200, **more: Any) -> Response:
    values = {
        "checked": None,
        "preview": None,
        "conflict": None,
        "is_unsafe": False,
        "force": page.form.get("force") == "yes",
        "periods": PERIODS,
        "period": page.form.get("period", ""),
        **more,
    }
    newest, from_file = await _newest(page)
    return page.render(
        "rules.html", status, draft=draft, newest=newest, from_file=from_file, **values
    )


async def _newest(page: Page) -> tuple[dict[str, Any] | None, str]:
    """Return the newest version; None and advice if the rules come from a file."""
    try:
        items = (await page.api.get("/versions", limit=1))["items"]
    except ApiProblem as error:
        if error.code != "RULES_FROM_FILE":
            raise
        return None, error.detail
    return items[0], ""


# ── Single rules ───────────────────────────────────────────────────────────────────────────────


class RuleRow(NamedTuple):
    """One rule, for people."""

    id: str
    mode: str
    rollout: int
    match: list[str]
    by: str
    limits: list[str]
    replaces: str

    @classmethod
    def of(cls, rule: Mapping[str, Any]) -> RuleRow:
        """Return the row of a rule of the document."""
        limits = [limit_text(each) for each in rule.get("limits", ())]
        for part in ("tiers", "keys"):
            for name, given in rule.get(part, {}).items():
                each = given["limits"] if isinstance(given, dict) else given
                limits.append(f"{name}: {', '.join(map(limit_text, each))}")
        return cls(
            id=rule["id"],
            mode=rule.get("mode", "enforce"),
            rollout=rule.get("rollout", 100),
            match=_conditions(rule.get("match", {})),
            by=", ".join(rule["by"]),
            limits=limits,
            replaces=rule.get("replaces", ""),
        )


def _conditions(match: Mapping[str, Any], path: str = "") -> list[str]:
    found: list[str] = []
    for name, patterns in match.items():
        if isinstance(patterns, Mapping):
            found += _conditions(patterns, f"{name}.")
        else:
            shown = ", ".join(patterns) if isinstance(patterns, list) else patterns
            found.append(f"{path}{name}: {shown}")
    return found


async def list_rules(page: Page) -> Response:
    """Show the rules one by one."""
    found = await page.api.call("GET", "/rules")
    # A document of megabytes is parsed in a thread: the worker answers checks meanwhile.
    every = await asyncio.to_thread(_rows, found.content)
    wanted = page.query("q").casefold()
    mode = page.query("mode")
    rows = [
        row
        for row in every
        if (not mode or row.mode == mode) and wanted in f"{row.id} {' '.join(row.match)}".casefold()
    ]
    offset = page.whole("offset")
    newest, from_file = await _newest(page)
    return page.render(
        "rules_list.html",
        rows=rows[offset : offset + RULES_PER_PAGE],
        total=len(rows),
        of=len(every),
        offset=offset,
        next=offset + RULES_PER_PAGE if offset + RULES_PER_PAGE < len(rows) else None,
        previous=max(0, offset - RULES_PER_PAGE) if offset else None,
        newest=newest,
        from_file=from_file,
    )


def _rows(document: bytes) -> list[RuleRow]:
    return [RuleRow.of(rule) for rule in json.loads(document).get("rules", ())]


async def show_rule(page: Page) -> Response:
    """Show one rule, with its controls."""
    return await _rule(page, page.query("id"))


async def _rule(page: Page, rule_id: str, status: int = 200, **more: Any) -> Response:
    found = await page.api.call("GET", f"/rules/{segment(rule_id)}")
    newest, from_file = await _newest(page)
    values = {"problem": None, "is_unsafe": False, "findings": (), "form": page.form, **more}
    return page.render(
        "rules_rule.html",
        status,
        rule=RuleRow.of(found.json()),
        text=yaml.safe_dump([found.json()], sort_keys=False, allow_unicode=True),
        etag=found.headers["etag"],
        newest=newest,
        from_file=from_file,
        modes=MODES,
        **values,
    )


class RuleCall(NamedTuple):
    """A call of the admin API that changes one rule."""

    method: str
    path: str
    data: dict[str, Any]
    done: str


def rule_change(rule: Mapping[str, Any], mode: str, rollout: int) -> RuleCall | None:
    """Return the call that gives a rule this mode and roll-out; None if it has both.

    To enforce a rule that is in shadow mode is a promotion, and the reverse of it a demotion if
    the rule replaces another: the audit log then says so.
    """
    patch: dict[str, Any] = {}
    if mode != rule.get("mode", "enforce"):
        patch["mode"] = mode
    if rollout != rule.get("rollout", 100):
        patch["rollout"] = rollout
    if not patch:
        return None
    path = f"/rules/{segment(rule['id'])}"
    if patch == {"mode": "enforce"} and rule.get("mode") == "shadow":
        return RuleCall("POST", f"{path}/promote", {}, "promoted")
    if patch == {"mode": "shadow"} and "mode" not in rule and rule.get("replaces"):
        return RuleCall("POST", f"{path}/demote", {}, "demoted")
    return RuleCall("PATCH", path, patch, "applied")


async def change_rule(page: Page) -> Response:
    """Change the mode or the roll-out of a rule."""
    rule_id = page.form.get("id", "")
    reason = page.form.get("reason", "").strip()
    rule = (await page.api.call("GET", f"/rules/{segment(rule_id)}")).json()
    mode = page.form.get("mode", rule.get("mode", "enforce"))
    rollout = page.form.get("rollout", str(rule.get("rollout", 100))).strip()
    wrong = ""
    if not reason:
        wrong = NO_REASON
    elif mode not in MODES:
        wrong = f"A rule is enforce, shadow or off, not {mode}."
    elif not (rollout.isascii() and rollout.isdecimal() and int(rollout[:9]) <= 100):
        wrong = f"The roll-out is a whole number from 0 to 100 percent, not {rollout}."
    if wrong:
        return await _rule(page, rule_id, 400, problem=page.problem(wrong))
    change = rule_change(rule, mode, int(rollout))
    if change is None:
        return page.redirect(f"{ROOT}/rules/rule", "unchanged", id=rule_id)
    try:
        await page.api.call(
            change.method,
            change.path,
            query={"force": page.form.get("force") == "yes"},
            data=change.data,
            headers={"If-Match": page.form.get("etag", ""), "X-Reason": header_text(reason)},
        )
    except ApiProblem as error:
        return await _rule_unchanged(page, rule_id, error)
    return page.redirect(f"{ROOT}/rules/rule", change.done, id=rule_id)


async def _rule_unchanged(page: Page, rule_id: str, error: ApiProblem) -> Response:
    details = {
        "VERSION_CONFLICT": _CHANGED_MEANWHILE,
        "UNSAFE_CHANGE": "This change is most likely a mistake, so nothing was changed. Correct "
        "it, or apply it anyway.",
    }
    known = error.code in details
    return await _rule(
        page,
        rule_id,
        error.status,
        problem=page.problem(details[error.code]) if known else page.problem_of(error),
        is_unsafe=error.code == "UNSAFE_CHANGE",
        findings=error.problem.get("findings", ()),
    )


# ── Versions ───────────────────────────────────────────────────────────────────────────────────


async def list_versions(page: Page) -> Response:
    """Show the versions, the newest first."""
    newest, from_file = await _newest(page)
    found: dict[str, Any] = {"items": [], "next": None}
    if not from_file:
        before = page.whole("before") or None
        found = await page.api.get("/versions", limit=VERSIONS_PER_PAGE, before=before)
    return page.render(
        "rules_versions.html",
        versions=found["items"],
        next=found["next"],
        newest=newest,
        from_file=from_file,
    )


async def show_version(page: Page) -> Response:
    """Show one version with its changes."""
    return await _version(page)


async def _version(page: Page, status: int = 200, problem: Problem | None = None) -> Response:
    number: int = page.request.path_params["number"]
    version = await page.api.get(f"/versions/{number}")
    newest, _ = await _newest(page)
    against = page.query("against")
    compared = {"against": page.whole("against")} if against else {}
    found = await page.api.get(f"/versions/{number}/diff", **compared)
    return page.render(
        "rules_version.html",
        status,
        problem=problem,
        shown=version,
        newest=newest,
        before=found["before"],
        diff=await asyncio.to_thread(diff_of, found["diff"]),
        reason=page.form.get("reason", ""),
    )


async def show_document(page: Page) -> Response:
    """Show the document of a version as plain text: it may have megabytes."""
    found = await page.api.get(f"/versions/{page.request.path_params['number']}")
    return PlainTextResponse(found["text"])


async def roll_back(page: Page) -> Response:
    """Make a new version with the rules of an old one."""
    number: int = page.request.path_params["number"]
    reason = page.form.get("reason", "").strip()
    if not reason:
        return await _version(page, 400, page.problem(NO_REASON))
    try:
        await page.api.call(
            "POST",
            f"/versions/{number}/rollback",
            data={"reason": reason},
            headers={"If-Match": page.form["etag"]} if page.form.get("etag") else {},
        )
    except ApiProblem as error:
        if error.status == 404:
            raise
        problem = page.problem_of(error)
        if error.code == "VERSION_CONFLICT":
            problem = page.problem(_CHANGED_MEANWHILE)
        return await _version(page, error.status, problem)
    return page.redirect(f"{ROOT}/rules", "rolled-back")


# ── Diffs ──────────────────────────────────────────────────────────────────────────────────────


class DiffLine(NamedTuple):
    """One line of a diff. `mark` is "+", "−", "…" (lines are left out) or empty."""

    mark: str
    before: int | None
    after: int | None
    text: str


class Diff(NamedTuple):
    """The changes between two documents."""

    lines: list[DiffLine]
    """At most DIFF_LINES_MAX."""
    added: int
    removed: int
    left_out: int
    """Lines that the page does not show."""


def diff_of(text: str) -> Diff:
    """Return the lines of a unified diff with their numbers.

    >>> [line.mark + line.text for line in diff_of("--- a\\n+++ b\\n@@ -1 +1 @@\\n-x\\n+y").lines]
    ['…', '−x', '+y']
    """
    lines: list[DiffLine] = []
    added = removed = before = after = 0
    # The first two lines are names.
    all_lines = text.split("\n")[2:]
    for line in all_lines:
        sign, rest = line[:1], line[1:]
        if sign == "+":
            made = DiffLine("+", None, after, rest)
            added += 1
            after += 1
        elif sign == "-":
            made = DiffLine("−", before, None, rest)
            removed += 1
            before += 1
        elif hunk := _HUNK.match(line):
            before, after = int(hunk[1]), int(hunk[2])
            made = DiffLine("…", None, None, "")
        else:
            made = DiffLine("", before, after, rest)
            before += 1
            after += 1
        if len(lines) < DIFF_LINES_MAX:
            lines.append(made)
    return Diff(lines, added, removed, len(all_lines) - len(lines))
