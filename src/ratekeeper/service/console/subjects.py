"""The page Subjects: the quotas of a user, key, tenant or address, and changes of them.

The URL names a subject by its parts: `?subject=tenant:acme&subject=user:42`. An API key is a
secret, and browsers keep URLs. So a URL has the digest of a key, as the records have it, and a
cookie of the browser has the key. A link with the key itself sets the cookie and leads there.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute

from ratekeeper.core.model import REQUEST_FIELDS
from ratekeeper.history.events import recorded_subject
from ratekeeper.rules.matching.patterns import escaped
from ratekeeper.service.console.attempts import try_url
from ratekeeper.service.console.audit import KINDS
from ratekeeper.service.console.client import ApiProblem, header_text, segment
from ratekeeper.service.console.denials import LISTS, try_fields
from ratekeeper.service.console.periods import LASTS, period_of
from ratekeeper.service.console.views import ROOT, Page, Problem, number, url, view

PATH: Final = f"{ROOT}/subjects"
ROWS: Final = 50
DENIALS: Final = 10
CHANGES: Final = 5
# A bare text is tried as each of these.
ATTRIBUTES: Final = ("user", "tenant", "ip", "api_key")
NAMES: Final = {"user": "user", "tenant": "tenant", "ip": "address", "api_key": "API key"}
KEY_COOKIE: Final = "ratekeeper_key"
KEY_SECONDS: Final = 3_600
_KEY: Final = "api_key:"
_DIGEST: Final = re.compile(r"api_key:#[0-9a-f]{24}")
# A cookie of 4 KB is the largest that browsers keep.
_KEY_LENGTH_MAX: Final = 600


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [
        view("/subjects", show),
        view("/subjects", send, "POST", changes=False),
        view("/subjects/quota", quota),
        view("/subjects/change", change, "POST"),
    ]


# ── Subjects ───────────────────────────────────────────────────────────────────────────────────


class Subject(NamedTuple):
    """A subject in its parts: `user:42`."""

    parts: tuple[str, ...]

    @property
    def fields(self) -> dict[str, str]:
        """The attributes of a request of this subject."""
        return dict(_split(part) for part in self.parts)

    @property
    def query(self) -> dict[str, str]:
        """The fields as the query of `quota` has them."""
        return {
            name if name in REQUEST_FIELDS else f"attributes.{name}": value
            for name, value in self.fields.items()
        }

    @property
    def body(self) -> dict[str, Any]:
        """The fields as the body of `quota/reset` has them."""
        known = {name: value for name, value in self.fields.items() if name in REQUEST_FIELDS}
        others = {name: value for name, value in self.fields.items() if name not in known}
        return {**known, **({"attributes": others} if others else {})}

    @property
    def owner(self) -> str | None:
        """The one user, key, tenant or address; None if it has several parts."""
        found = len(self.parts) == 1 and _split(self.parts[0])[0] in ATTRIBUTES
        return self.parts[0] if found else None

    @property
    def can_have_tier(self) -> bool:
        """True if a tier can be assigned to it."""
        return self.owner is not None and not self.owner.startswith("ip:")

    @property
    def entry(self) -> str:
        """The entry of a list that names this client and no other."""
        name, value = _split(self.parts[0])
        return f"{name}:{value if name == 'ip' else escaped(value)}"

    @property
    def reference(self) -> list[str]:
        """The parts as a URL has them: a key as its digest."""
        return [
            recorded_subject(part, "hashed") if part.startswith(_KEY) else part
            for part in self.parts
        ]

    @property
    def has_key(self) -> bool:
        """True if an API key is a part of it."""
        return any(part.startswith(_KEY) for part in self.parts)

    @property
    def text(self) -> str:
        """The subject for people."""
        return ", ".join(self.parts)

    @property
    def json(self) -> str:
        """The subject for a field of a form."""
        return json.dumps(self.parts)

    def link(self, path: str = "", **query: Any) -> str:
        """Return the URL of the subject's page, or of a part of it."""
        return url(f"{PATH}{path}", subject=self.reference, **query)


def _split(part: str) -> tuple[str, str]:
    name, _, value = part.partition(":")
    return name, value


def subject_of(parts: Sequence[str]) -> Subject:
    """Return the subject with these parts. Raises ValueError.

    >>> subject_of(["tenant:acme", "user:42"]).fields
    {'tenant': 'acme', 'user': '42'}
    """
    names = [_split(part)[0] for part in parts]
    if not parts or len(set(names)) != len(names) or not all(":" in part for part in parts):
        raise ValueError("A subject is written like user:42, tenant:acme or ip:192.0.2.7.")
    return Subject(tuple(parts))


def _sent(text: str) -> Subject:
    """Return the subject of a form. Raises ValueError."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError("The form names no subject.")
    return subject_of(found)


def _resolved(page: Page, parts: Sequence[str]) -> Subject:
    """Return the subject of a URL, with the key of the cookie. Raises ValueError."""
    known = _key_of(page)
    found = []
    for part in parts:
        if _DIGEST.fullmatch(part):
            if known is None or recorded_subject(f"{_KEY}{known}", "hashed") != part:
                raise ValueError(
                    "This address names an API key by its digest, and your browser no longer "
                    "holds the key. Search for the key again."
                )
            found.append(f"{_KEY}{known}")
        else:
            found.append(part)
    return subject_of(found)


def _key_of(page: Page) -> str | None:
    with suppress(ValueError):
        raw = page.request.cookies.get(KEY_COOKIE, "")
        return base64.urlsafe_b64decode(raw).decode() or None
    return None


def _opened(page: Page, subject: Subject, done: str = "") -> Response:
    """Return the redirect to the page of a subject; its key goes into the cookie."""
    response = page.redirect(PATH, done, subject=subject.reference)
    key = subject.fields.get("api_key")
    if key is not None and len(key) <= _KEY_LENGTH_MAX:
        text = base64.urlsafe_b64encode(key.encode("utf-8", "replace")).decode()
        page.set_secret(response, KEY_COOKIE, text, seconds=KEY_SECONDS, path=PATH)
    return response


# ── Search ─────────────────────────────────────────────────────────────────────────────────────


async def show(page: Page) -> Response:
    """Show one subject, the results of a search, or where to begin."""
    parts = page.request.query_params.getlist("subject")
    text = page.request.query_params.get("q", "").strip()
    try:
        if parts:
            subject = _resolved(page, parts)
            in_url = any(part in subject.parts for part in parts if part.startswith(_KEY))
            return _opened(page, subject) if in_url else await _one(page, subject)
        if exact := exact_subject(text):
            return _opened(page, exact)
    except ValueError as error:
        return await _search(page, text, problem=page.problem(str(error)), status=404)
    return await _search(page, text, page.request.query_params.get("after", ""))


async def send(page: Page) -> Response:
    """Answer a search. A search for a key has no URL."""
    text, after = page.form.get("q", "").strip(), page.form.get("after", "")
    try:
        if asked := page.form.get("open"):
            return _opened(page, _sent(asked))
        if exact := exact_subject(text):
            return _opened(page, exact)
    except ValueError as error:
        return await _search(page, text, problem=page.problem(str(error)), status=400)
    if text.startswith(_KEY) or _KEY in after:
        return await _search(page, text, after)
    return RedirectResponse(url(PATH, q=text, after=after), 303)


def exact_subject(text: str) -> Subject | None:
    """Return the subject that a search names, or None if it is the beginning of several.

    >>> exact_subject("user:42"), exact_subject("user:4*"), exact_subject("42")
    (Subject(parts=('user:42',)), None, None)
    """
    name, value = _split(text)
    if name in ATTRIBUTES and value and not value.endswith("*"):
        return subject_of([text])
    return None


async def _search(
    page: Page, text: str, after: str = "", problem: Problem | None = None, status: int = 200
) -> Response:
    found: Mapping[str, Any] = {"items": [], "next": None}
    busiest: Sequence[Mapping[str, Any]] = ()
    penalties: Sequence[Mapping[str, Any]] = ()
    try:
        if text and problem is None:
            found = await page.api.get(
                "/subjects", q=text.removesuffix("*"), after=after, limit=ROWS
            )
        else:
            penalties = (await page.api.get("/penalties"))["items"]
            busiest = await _busiest(page)
    except ApiProblem as error:
        problem, status = problem or page.problem_of(error), error.status
    return page.render(
        "subjects.html",
        status,
        q=text,
        found=found,
        after=after,
        busiest=busiest,
        penalties=penalties,
        first=page.whole("penalties"),
        rows=ROWS,
        problem=problem,
        guesses=[Subject((f"{name}:{text}",)) for name in ATTRIBUTES] if text else [],
        **_WORDS,
    )


async def _busiest(page: Page) -> list[Mapping[str, Any]]:
    """Return the busiest subjects of the last minutes that have a page; none without records."""
    try:
        found = (await page.api.get("/top", by="checks", limit=20))["items"]
    except ApiProblem as error:
        if error.code == "NOT_RECORDED":
            return []
        raise
    return [
        each
        for each in found
        if each["subject"] and all(":" in part and ":#" not in part for part in each["subject"])
    ][:10]


# ── One subject ────────────────────────────────────────────────────────────────────────────────


class PagePart(NamedTuple):
    """An answer of the admin API, or why there is none."""

    found: Any = None
    problem: str = ""
    code: str = ""


async def _part(asked: Awaitable[Any]) -> PagePart:
    """Return a part of the page. If it fails, the page still shows the others."""
    try:
        return PagePart(await asked)
    except ApiProblem as error:
        return PagePart(None, error.detail, error.code)


async def quota(page: Page) -> Response:
    """Show the bars alone, for a page that is open."""
    try:
        subject = _resolved(page, page.request.query_params.getlist("subject"))
    except ValueError as error:
        return page.failed(404, str(error))
    found = await page.api.get("/quota", every=True, **subject.query)
    return page.render("subject_quota.html", subject=subject, quota=found)


async def _one(
    page: Page,
    subject: Subject,
    problem: Problem | None = None,
    status: int = 200,
) -> Response:
    """Show one subject. With a problem, the form that was sent keeps its values."""
    try:
        found = await page.api.get("/quota", every=True, **subject.query)
        period = period_of(page, "24h")
    except ApiProblem as error:
        shown = problem or page.problem_of(error)
        return await _search(page, subject.text, problem=shown, status=error.status)
    except ValueError as error:
        return page.failed(400, str(error))
    last, seconds = period.last, 60 if period.last in {"15m", "1h"} else 3_600
    times = period.times(datetime.now(UTC))
    api, owner = page.api, subject.owner
    nothing: Callable[[], Awaitable[Any]] = _nothing
    usage, denials, audit, overrides, denied, allowed, tier, tiers = await asyncio.gather(
        *map(
            _part,
            (
                api.get(
                    "/usage",
                    subject=list(subject.parts),
                    step="minute" if seconds == 60 else "hour",
                    limit=10_000,
                    **times,
                ),
                api.get("/decisions", outcome="denied", limit=DENIALS, **_denials_of(subject)),
                api.get("/audit", key=owner, limit=CHANGES) if owner else nothing(),
                api.get("/overrides", subject=owner, limit=200) if owner else nothing(),
                api.get("/lists/deny", entry=subject.entry) if owner else nothing(),
                api.get("/lists/allow", entry=subject.entry) if owner else nothing(),
                _tier_of(page, subject),
                api.get("/tiers", limit=200) if page.can_change else nothing(),
            ),
        )
    )
    chart = None
    if usage.found is not None:
        chart = usage_chart(usage.found["items"], usage.found["from"], usage.found["to"], seconds)
    return page.render(
        "subject.html",
        status,
        subject=subject,
        quota=found,
        usage=usage,
        chart=chart,
        lasts=LASTS,
        last=last,
        denials=denials,
        audit=audit,
        overrides=overrides,
        is_denied=bool(denied.found and denied.found["total"]),
        is_allowed=bool(allowed.found and allowed.found["total"]),
        tier=tier,
        tiers=tiers,
        problem=problem,
        typed=page.form,
        failed=page.form.get("do", ""),
        try_url=try_url(subject.fields),
        denials_url=url(f"{ROOT}/denials", **_denials_link(subject)),
        **_WORDS,
    )


async def _nothing() -> None:
    """Return at once: the subject cannot have such a part."""


async def _tier_of(page: Page, subject: Subject) -> Any:
    """Return the assignment of a subject; None if it has none."""
    if not subject.can_have_tier or "\n" in subject.parts[0]:
        return None
    try:
        return await page.api.get(f"/assignments/{segment(subject.parts[0])}")
    except ApiProblem as error:
        if error.status == 404:
            return None
        raise


def _denials_of(subject: Subject) -> dict[str, Any]:
    """Return the filter of a subject's denials: of a user or tenant also those by other rules."""
    fields = subject.fields
    since = (datetime.now(UTC) - timedelta(days=7)).replace(microsecond=0)
    given: dict[str, Any] = {"from_": since.isoformat().replace("+00:00", "Z")}
    if len(fields) == 1 and ("user" in fields or "tenant" in fields):
        return {**given, **fields}
    return {**given, "subject": list(subject.parts)}


def _denials_link(subject: Subject) -> dict[str, Any]:
    if subject.has_key:
        return {}
    found = _denials_of(subject)
    found["last"] = "7d"
    del found["from_"]
    if "subject" in found:
        found["subject"] = ", ".join(found["subject"])
    return found


def usage_chart(
    items: Sequence[Mapping[str, Any]], since: str, until: str, seconds: int
) -> dict[str, list[int]]:
    """Return the usage under all rules in equal steps, also in steps without any.

    >>> row = {"start": "2026-11-15T12:00:00Z", "allowed": 3, "denied": 1, "units": 3}
    >>> usage_chart([row, row], "2026-11-15T12:00:30Z", "2026-11-15T12:02:00Z", 60)
    {'times': [1794744000, 1794744060], 'allowed': [6, 0], 'denied': [2, 0], 'units': [6, 0]}
    """
    first, end = (int(datetime.fromisoformat(each).timestamp()) for each in (since, until))
    times = list(range(first // seconds * seconds, max(end, first + 1), seconds))
    places = {time: at for at, time in enumerate(times)}
    sums: dict[str, list[int]] = {name: [0] * len(times) for name in ("allowed", "denied", "units")}
    for each in items:
        start = int(datetime.fromisoformat(each["start"]).timestamp()) // seconds * seconds
        at = places.get(start)
        if at is not None:
            for name, counts in sums.items():
                counts[at] += each[name]
    return {"times": times, **sums}


# ── Changes ────────────────────────────────────────────────────────────────────────────────────


class InvalidField(Exception):
    """A field of a form cannot be sent."""


async def change(page: Page) -> Response:
    """Make the change that a form asks for, and show the subject again."""
    make = _MAKERS.get(page.form.get("do", ""))
    subject = None
    with suppress(ValueError):
        subject = _sent(page.form.get("subject", ""))
    if make is None or subject is None or (subject.owner is None and make not in _OF_COUNTS):
        return page.failed(400, "The form is not one of this page. Open the subject again.")
    try:
        done = await make(page, subject)
    except InvalidField as error:
        return await _one(page, subject, page.problem(str(error)), 422)
    except ApiProblem as error:
        return await _one(page, subject, page.problem_of(error), error.status)
    return _opened(page, subject, done)


def _reason(page: Page) -> str:
    reason = " ".join(page.form.get("reason", "").split())
    if not reason:
        raise InvalidField("Reason: say why, for the audit log.")
    return reason


def _whole(page: Page, name: str, label: str, least: int = 1) -> int:
    text = page.form.get(name, "").strip().replace(",", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 19) or int(text) < least:
        raise InvalidField(f"{label}: write a whole number of at least {number(least)}.")
    return int(text)


def _rule(page: Page) -> dict[str, Any]:
    """Return the rules that a change of counts is about: all of the subject, or one."""
    rule = page.form.get("rule", "")
    return {"every": True, **({"rule": rule} if rule else {})}


async def _grant(page: Page, subject: Subject) -> str:
    body = {**subject.body, **_rule(page), "units": _whole(page, "units", "Units")}
    if page.form.get("minutes", "").strip():
        body["ttl_seconds"] = 60 * _whole(page, "minutes", "Minutes")
    await page.api.call("POST", "/quota/grant", data={**body, "reason": _reason(page)})
    return "granted"


async def _reset(page: Page, subject: Subject) -> str:
    body = {**subject.body, **_rule(page), "reason": _reason(page)}
    await page.api.call("POST", "/quota/reset", data=body)
    return "reset"


async def _pardon(page: Page, subject: Subject) -> str:
    await _reset(page, subject)
    return "pardoned"


async def _override(page: Page, subject: Subject) -> str:
    name, value = _split(subject.parts[0])
    body: dict[str, Any] = {"for": {name: value}, "reason": _reason(page)}
    if rule := page.form.get("rule", ""):
        body["rule"] = rule
    limits, factor = page.form.get("limits", "").strip(), page.form.get("multiply", "").strip()
    if bool(limits) == bool(factor):
        raise InvalidField("Write either limits, such as 100/minute, or a factor, such as 2.")
    if limits:
        body["limits"] = [each.strip() for each in limits.split(",")]
    else:
        try:
            body["multiply"] = float(factor)
        except ValueError:
            raise InvalidField("Factor: write a number, such as 2 or 0.5.") from None
    body["until"] = page.form.get("until", "").strip()
    if not body["until"]:
        raise InvalidField("End: write a duration such as 2h or 30d, or a time with its zone.")
    await page.api.call("POST", "/overrides", data=body)
    return "override-added"


async def _remove_override(page: Page, _: Subject) -> str:
    name = page.form.get("id", "")
    await page.api.call(
        "DELETE", f"/overrides/{segment(name)}", headers={"X-Reason": header_text(_reason(page))}
    )
    return "override-removed"


async def _assign(page: Page, subject: Subject) -> str:
    tier = page.form.get("tier", "")
    if not tier:
        raise InvalidField("Tier: choose one.")
    body = {"tier": tier, "reason": _reason(page)}
    await page.api.call("PUT", f"/assignments/{segment(subject.parts[0])}", data=body)
    return "assigned"


async def _unassign(page: Page, subject: Subject) -> str:
    headers = {"X-Reason": header_text(_reason(page))}
    await page.api.call("DELETE", f"/assignments/{segment(subject.parts[0])}", headers=headers)
    return "unassigned"


async def _block(page: Page, subject: Subject) -> str:
    body = {"entry": subject.entry, "reason": _reason(page)}
    await page.api.call("POST", "/lists/deny", data=body)
    return "blocked"


async def _unblock(page: Page, subject: Subject) -> str:
    headers = {"X-Reason": header_text(_reason(page))}
    await page.api.call("DELETE", "/lists/deny", query={"entry": subject.entry}, headers=headers)
    return "unblocked"


# Changes of counts; the others are of one user, key, tenant or address.
_OF_COUNTS: Final = (_grant, _reset, _pardon)
_MAKERS: Final[Mapping[str, Callable[[Page, Subject], Awaitable[str]]]] = {
    "grant": _grant,
    "reset": _reset,
    "pardon": _pardon,
    "override": _override,
    "remove-override": _remove_override,
    "assign": _assign,
    "unassign": _unassign,
    "block": _block,
    "unblock": _unblock,
}
# The names that the templates use.
_WORDS: Final[Mapping[str, Any]] = {
    "names": NAMES,
    "kinds": KINDS,
    "lists": LISTS,
    "subject_of": subject_of,
    "try_fields": try_fields,
}
