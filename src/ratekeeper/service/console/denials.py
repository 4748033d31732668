"""The page Denials and usage: the subjects that are denied most, when and why, and their usage.

The page has four parts: denials over time, denials in groups, usage, and single decisions. Each is
one call of the admin API with the filters of the URL. The lists have pages of their own, which a
script loads without the rest (`hx-target` names the part).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from starlette.responses import Response
from starlette.routing import BaseRoute

from ratekeeper.service.console.client import ApiProblem
from ratekeeper.service.console.periods import LASTS, Period, period_of
from ratekeeper.service.console.views import ROOT, Page, duration, number, url, view

PATH: Final = f"{ROOT}/denials"
ROWS: Final = 20
# The groupings of denials: the key, the heading of the column, the words in a sentence.
GROUPS: Final = (
    ("rule", "Rule", "rules"),
    ("subject", "Subject", "subjects"),
    ("tenant", "Tenant", "tenants"),
    ("user", "User", "users"),
    ("endpoint", "Endpoint", "endpoints"),
)
# The outcomes that can be counted: the key, its name in the form, and in a sentence.
OUTCOMES: Final = (
    ("", "Denied", "denied request{s}"),
    ("shadow_denied", "Would be denied (shadow mode)", "request{s} that shadow rules would deny"),
    ("allowed", "Allowed (a sample)", "allowed request{s} in the sample"),
    ("excess", "Above a limit across regions", "report{s} of use above a limit across regions"),
)
KINDS: Final = {
    "limited": "a limit decided",
    "cooldown": "a cool-down after too many denials",
    "block": "a block after repeated cool-downs",
    "blocked": "the deny list has the client",
    "exempt": "the allow list has the client",
    "unlimited": "no rule applies",
    "unavailable": "the store was unavailable",
}
# Names that stand in the place of a rule.
LISTS: Final = {
    "(allow)": "the allow list",
    "(deny)": "the deny list",
    "(none)": "no rule applies",
}
OTHERS: Final = "(others)"
# Two parts of a subject in one field: a comma, and the name of the next part.
_PART: Final = re.compile(r",\s+(?=[\w.-]+:)")
_CSV: Final = {"groups": "/denials", "usage": "/usage", "decisions": "/decisions"}


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/denials", show), view("/denials/{name}.csv", download)]


# ── The URL ────────────────────────────────────────────────────────────────────────────────────


class Asked(NamedTuple):
    """The parameters in the URL."""

    period: Period
    by: str
    filters: Mapping[str, Any]
    """The filters of decisions, as in the URL and as the admin API has them."""
    times: Mapping[str, str]

    def link(self, **changed: Any) -> str:
        """Return the URL of the page with some fields changed; without pages of its lists."""
        return url(PATH, **{**self._query(), **changed})

    def following(self, **cursor: str | None) -> str:
        """Return the URL of the next page of a list, of the same period."""
        if not all(cursor.values()):
            return ""
        return url(PATH, **{**self._query(), "last": "", **self.times, **cursor})

    def csv(self, name: str) -> str:
        """Return the URL of a whole list as a file."""
        return url(f"{PATH}/{name}.csv", **{**self._query(), "last": "", **self.times})

    def _query(self) -> dict[str, Any]:
        period = self.period
        shown = {"last": period.last, "from_": period.from_, "to": period.to}
        return {**shown, "by": "" if self.by == "rule" else self.by, **self.filters}


def asked_of(page: Page, now: datetime) -> Asked:
    """Return the parameters in the URL of a request. Raises ValueError."""
    period = period_of(page, default="1h")
    by = page.query("by") or "rule"
    if by not in {key for key, _, _ in GROUPS}:
        known = ", ".join(key for key, _, _ in GROUPS)
        raise ValueError(f"by={by[:40]!r} is no grouping; choose one of {known}.")
    return Asked(period, by, _filters(page), period.times(now))


def _filters(page: Page) -> dict[str, Any]:
    names = ("rule", "user", "tenant", "endpoint", "request_id", "outcome")
    found: dict[str, Any] = {name: page.query(name) for name in names}
    given = [each.strip() for each in page.request.query_params.getlist("subject")]
    parts = [each for each in given if each]
    return {**found, "subject": _PART.split(parts[0]) if len(given) == 1 and parts else parts}


def subject_fields(parts: Sequence[str]) -> list[str]:
    """Return the parts of a subject as fields of a URL, from which they are read unchanged.

    A single field may have several parts, because people type them so. A part that looks like two
    gets an empty field beside it.

    >>> subject_fields(["user:42"]), subject_fields(["user:a, b:c"])
    (['user:42'], ['user:a, b:c', ''])
    """
    return [*parts, ""] if len(parts) == 1 and _PART.search(parts[0]) else list(parts)


# ── The page ───────────────────────────────────────────────────────────────────────────────────


async def show(page: Page) -> Response:
    """Show the page, or one part of it."""
    period = Period("1h", page.query("from"), page.query("to"))
    asked = Asked(period, "rule", _filters(page), {})
    part = page.request.headers.get("hx-target", "") if page.is_partial else ""
    try:
        asked = asked_of(page, datetime.now(UTC))
        if part in PARTS:
            found = await PARTS[part](page, asked)
            return page.render(f"denials_{part}.html", asked=asked, **_WORDS, **found)
        values: dict[str, Any] = {}
        for load in PARTS.values():
            values |= await load(page, asked)
    except ValueError as error:
        return _page(page, asked, 400, problem=page.problem(str(error)))
    except ApiProblem as error:
        if error.code == "NOT_RECORDED":
            return _page(page, asked, is_recorded=False)
        return _page(page, asked, error.status, problem=page.problem_of(error))
    return _page(page, asked, is_complete=True, **values)


def _page(page: Page, asked: Asked, status: int = 200, **values: Any) -> Response:
    if page.is_partial and "problem" in values:
        return page.render("problem.html", status, **values)
    values = {"is_recorded": True, "is_complete": False, **values}
    return page.render("denials.html", status, asked=asked, lasts=LASTS, **_WORDS, **values)


async def _over_time(page: Page, asked: Asked) -> dict[str, Any]:
    found = await page.api.get("/denials", by="time", **asked.times, **asked.filters)
    chart = chart_of(found)
    return {"over_time": found, "chart": chart, "summary": summary_of(found, chart)}


async def _groups(page: Page, asked: Asked) -> dict[str, Any]:
    found = await page.api.get(
        "/denials",
        by=asked.by,
        limit=ROWS,
        after=page.query("groups_after"),
        **asked.times,
        **asked.filters,
    )
    return {"groups": found, "is_first_group": not page.query("groups_after")}


async def _usage(page: Page, asked: Asked) -> dict[str, Any]:
    filters = {name: asked.filters[name] for name in ("rule", "subject")}
    found = await page.api.get(
        "/usage",
        step="period",
        limit=ROWS,
        after=page.query("usage_after"),
        **asked.times,
        **filters,
    )
    ignored = [name for name in ("user", "tenant", "endpoint") if asked.filters[name]]
    return {"usage": found, "ignored": ignored, "is_first_usage": not page.query("usage_after")}


async def _decisions(page: Page, asked: Asked) -> dict[str, Any]:
    filters = {**asked.filters, "outcome": asked.filters["outcome"] or "denied"}
    found = await page.api.get(
        "/decisions", limit=ROWS, before=page.query("before"), **asked.times, **filters
    )
    return {"decisions": found, "is_first_decision": not page.query("before")}


PARTS: Final = {
    "over-time": _over_time,
    "groups": _groups,
    "usage": _usage,
    "decisions": _decisions,
}


async def download(page: Page) -> Response:
    """Return a whole list of the page as a CSV file."""
    name = page.request.path_params["name"]
    if name not in _CSV:
        return page.failed(404, "There is no such file. The page has links to all files.")
    try:
        asked = asked_of(page, datetime.now(UTC))
    except ValueError as error:
        return page.failed(400, str(error))
    query: dict[str, Any] = {**asked.times, **asked.filters, "format": "csv"}
    if name == "groups":
        query["by"] = asked.by
    elif name == "usage":
        query = {key: query[key] for key in ("from_", "to", "rule", "subject", "format")}
        query["step"] = "period"
    else:
        query["outcome"] = query["outcome"] or "denied"
    return page.api.file(_CSV[name], query, lambda error: page.failed(error.status, error.detail))


# ── For the templates ──────────────────────────────────────────────────────────────────────────


def chart_of(found: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the steps of a period and their counts, also those without denials.

    >>> time = "2026-11-15T12:00:{:02}Z".format
    >>> items = [{"start": time(10), "requests": 4}]
    >>> chart_of({"from": time(5), "to": time(25), "seconds": 10, "items": items})
    {'times': [1794744000, 1794744010, 1794744020], 'counts': [0, 4, 0]}
    """
    step = found["seconds"]
    counts = {_seconds(each["start"]): each["requests"] for each in found["items"]}
    first, end = _seconds(found["from"]) // step * step, _seconds(found["to"])
    times = list(range(first, max(end, first + 1), step))
    return {"times": times, "counts": [counts.get(time, 0) for time in times]}


def summary_of(found: Mapping[str, Any], chart: Mapping[str, Sequence[int]]) -> str:
    """Return a sentence that describes a chart."""
    what = next(words for key, _, words in OUTCOMES if key == _outcome(found))
    if not found["items"]:
        return f"No {what.format(s='s')} in this time."
    highest = max(chart["counts"])
    step = duration(found["seconds"])
    what = what.format(s="" if found["total"] == 1 else "s")
    return f"{number(found['total'])} {what}; at most {number(highest)} in {step}."


def _outcome(found: Mapping[str, Any]) -> str:
    return "" if found["outcome"] == "denied" else str(found["outcome"])


def _seconds(time: str) -> int:
    return int(datetime.fromisoformat(time).timestamp())


def who(parts: Sequence[str] | None) -> str:
    """Return a subject for people.

    >>> who(["tenant:acme", "user:7"]), who(["*"]), who(["(others)"]), who([])
    ('tenant:acme, user:7', 'all requests together', 'other subjects', 'not recorded')
    """
    if not parts:
        return "not recorded"
    text = ", ".join(parts)
    return {"*": "all requests together", OTHERS: "other subjects"}.get(text, text)


def is_named(parts: Sequence[str] | None) -> bool:
    """Return True if a recorded subject is one that other pages can show."""
    return bool(parts) and all(":" in part and ":#" not in part for part in parts or ())


def hints(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the explanations that the subjects of a list need."""
    found = []
    subjects = [each["subject"] for each in rows if each.get("subject") is not None]
    if any(":#" in part for parts in subjects for part in parts):
        found.append(
            "A name with # is a digest: the service records subjects with --record-subjects "
            "hashed. To find a client, type its name into the filter."
        )
    if any(not parts for parts in subjects):
        found.append(
            "Subjects that are not recorded: the service runs with --record-subjects none, or no "
            "rule counts these requests."
        )
    if [OTHERS] in subjects:
        found.append(
            "Other subjects: more subjects than the records have room for. Their requests are "
            "counted together."
        )
    return found


def try_fields(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of a decision as fields of the page Try a request.

    A digest is no name, so it is left out; so is the API key, which is always one.
    """
    fields = {name: decision["identity"][name] for name in ("user", "tenant", "ip")}
    known = {name: value for name, value in fields.items() if value and value[0] != "#"}
    cost = decision["cost"] if decision["cost"] > 1 else None
    return {**known, "endpoint": decision["endpoint"], "method": decision["method"], "cost": cost}


# The names that the templates use.
_WORDS: Final[Mapping[str, Any]] = {
    "group_names": GROUPS,
    "outcomes": OUTCOMES,
    "kinds": KINDS,
    "lists": LISTS,
    "who": who,
    "is_named": is_named,
    "hints": hints,
    "subject_fields": subject_fields,
    "try_fields": try_fields,
}
