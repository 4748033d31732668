"""The page Audit: every change, its author, time, reason, and what it changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from starlette.responses import Response
from starlette.routing import BaseRoute

from ratekeeper.service.console.client import ApiProblem
from ratekeeper.service.console.periods import LASTS, Period, period_of
from ratekeeper.service.console.views import ROOT, Page, url, view

PATH: Final = f"{ROOT}/audit"
ROWS: Final = 20
DIFF_LINES_MAX: Final = 200
# The kinds of changes, and their descriptions.
KINDS: Final = {
    "apply": "rules applied",
    "rollback": "rules rolled back",
    "put-rule": "rule written",
    "patch-rule": "rule changed",
    "remove-rule": "rule removed",
    "promote": "rule enforced",
    "demote": "rule in shadow mode",
    "set-tier": "tier written",
    "remove-tier": "tier removed",
    "assign": "tier assigned",
    "unassign": "tier unassigned",
    "override": "override added",
    "remove-override": "override removed",
    "list": "list entry added",
    "unlist": "list entry removed",
    "import": "entries imported",
    "grant": "units granted",
    "grant-failed": "grant failed",
    "reset": "counts reset",
    "reset-failed": "reset failed",
    "set-regions": "shares of regions set",
    "add-region": "region added",
    "remove-region": "region removed",
}
# The parts of a request that other pages can show. An API key is a secret: no URL has one.
_NAMES: Final = ("tenant", "user", "ip")


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/audit", show)]


async def show(page: Page) -> Response:
    """Show a page of the audit log."""
    filters = {name: page.query(name) for name in ("author", "kind", "key")}
    period = Period("", page.query("from"), page.query("to"))
    try:
        period = period_of(page)
        is_timed = period.last or period.from_ or period.to
        times = period.times(datetime.now(UTC)) if is_timed else {}
        found = await page.api.get(
            "/audit", limit=ROWS, before=page.query("before"), **filters, **times
        )
    except ValueError as error:
        return _page(page, filters, period, 400, problem=page.problem(str(error)))
    except ApiProblem as error:
        if error.code == "RULES_FROM_FILE":
            return _page(page, filters, period, is_from_file=True)
        return _page(page, filters, period, error.status, problem=page.problem_of(error))
    return _page(page, filters, period, found=found, times=times)


def _page(
    page: Page, filters: Mapping[str, str], period: Period, status: int = 200, **values: Any
) -> Response:
    shown = {"last": period.last, "from_": period.from_, "to": period.to, **filters}

    def link(**changed: Any) -> str:
        return url(PATH, **{**shown, **changed})

    values = {"found": None, "is_from_file": False, "times": {}, **values}
    return page.render(
        *("audit.html", status),
        filters=filters,
        period=period,
        lasts=LASTS,
        link=link,
        kinds=KINDS,
        subjects=subjects_of,
        pretty=pretty,
        diff=diff_lines,
        is_filtered=any(shown.values()),
        is_first=not page.query("before"),
        **values,
    )


def subjects_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the subjects that a change is about and that other pages can show.

    >>> subjects_of({"kind": "assign", "key": "user:42"})
    ['user:42']
    >>> subjects_of({"kind": "override", "key": "ov_1", "after": '{"for": {"user": "7"}}'})
    ['user:7']
    >>> subjects_of({"kind": "grant", "key": "", "after": '{"request": {"user": "7"}}'})
    ['user:7']
    """
    if entry["kind"] in {"assign", "unassign"}:
        return [] if entry["key"].startswith("api_key:") else [entry["key"]]
    data = _object(entry.get("after") or entry.get("before"))
    owner = data.get("request", data.get("for"))
    if not isinstance(owner, dict):
        return []
    return [f"{name}:{owner[name]}" for name in _NAMES if isinstance(owner.get(name), str)]


def pretty(text: str) -> str:
    """Return JSON on several lines, and every other text as it is.

    >>> print(pretty('{"tier":"pro"}'))
    {
      "tier": "pro"
    }
    """
    found = _object(text)
    return json.dumps(found, indent=2, ensure_ascii=False) if found else text


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):  # such as a text that the list has cut
        return {}
    return found if isinstance(found, dict) else {}


def diff_lines(diff: str) -> list[tuple[str, str]]:
    """Return the lines of a diff, each with its kind: added, removed, or same.

    >>> diff_lines("--- 1\\n+++ 2\\n@@ -1 +1 @@\\n-a\\n+b\\n")
    [('same', '@@ -1 +1 @@'), ('removed', '-a'), ('added', '+b')]
    """
    lines = [line for line in diff.splitlines() if not line.startswith(("--- ", "+++ "))]
    kinds = {"+": "added", "-": "removed"}
    shown = [(kinds.get(line[:1], "same"), line) for line in lines[:DIFF_LINES_MAX]]
    return shown + ([("same", "…")] if len(lines) > DIFF_LINES_MAX else [])
