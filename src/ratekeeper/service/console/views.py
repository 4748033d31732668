"""The code that every page of the console uses: the operator's request, its form, and rendering.

    async def audit(page: Page) -> Response:
        found = await page.api.get("/audit", author=page.query("author"))
        return page.render("audit.html", entries=found["items"])

    def routes() -> list[BaseRoute]:
        return [view("/audit", audit)]

`view` makes a route of such a function. The function is called for an operator who has logged in;
a POST is passed on only if it comes from a form of the operator's own session. A problem of the
admin API that the function does not handle becomes an error page.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes, urlencode, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ratekeeper.core.version import __version__
from ratekeeper.service.admin.control import Busy, HeavyWork
from ratekeeper.service.console.client import AdminClient, ApiProblem
from ratekeeper.service.console.sessions import CONSOLE, Session, Sessions
from ratekeeper.service.http.bodies import BodyRejected
from ratekeeper.service.http.context import REQUEST_ID, ServiceContext
from ratekeeper.service.http.incoming import body_bytes_max
from ratekeeper.service.http.static_files import console_files
from ratekeeper.service.http.tokens import Token
from ratekeeper.web.requests import AsgiRequest

ROOT: Final = CONSOLE
COOKIE: Final = "ratekeeper_console"
FORM_FIELDS_MAX: Final = 200
# A form is decoded in slices: the decoder needs a hundred times the memory of what it decodes.
SLICE_BYTES: Final = 64 * 1024
# The pages of the navigation: name, path.
NAVIGATION: Final = (
    ("Overview", ROOT),
    ("Rules", f"{ROOT}/rules"),
    ("Try a request", f"{ROOT}/try"),
    ("Subjects", f"{ROOT}/subjects"),
    ("Denials and usage", f"{ROOT}/denials"),
    ("Fleet and regions", f"{ROOT}/fleet"),
    ("Audit", f"{ROOT}/audit"),
)
# The seconds of a unit and its name, and those of the next smaller one.
_UNITS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
# The messages of a page after a change. The URL holds the key, never a text.
DONE: Final = {
    "applied": "The rules are applied.",
    "unchanged": "Nothing changed: these rules are already in force.",
    "rolled-back": "The rules are rolled back.",
    "promoted": "The rule is enforced now.",
    "demoted": "The rule is in shadow mode again.",
    "granted": "The units are granted.",
    "reset": "The counts are reset.",
    "override-added": "The override is in force.",
    "override-removed": "The override is removed.",
    "assigned": "The tier is assigned.",
    "unassigned": "The tier is no longer assigned.",
    "blocked": "The subject is blocked.",
    "unblocked": "The subject is no longer blocked.",
    "pardoned": "The penalty is ended.",
    "sessions-ended": "The other sessions are ended.",
}


@cache
def environment() -> Environment:
    """Return the templates of all consoles in this process: each is compiled only once."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {
        "root": ROOT,
        "navigation": NAVIGATION,
        "version": __version__,
        "url": url,
        "time": time_element,
        "asset": console_files().url,
    }
    found.filters |= {"number": number, "duration": duration, "limit": limit_text}
    found.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return found


@dataclass(slots=True)
class Console:
    """The console of one worker."""

    context: ServiceContext
    admin: ASGIApp
    sessions: Sessions
    heavy: HeavyWork
    templates: Environment = field(default_factory=environment)

    def page(self, request: Request, session: Session | None) -> Page:
        """Return the page of a request."""
        return Page(self, request, session)


class Problem:
    """An error, for the template of a page."""

    def __init__(self, detail: str, request_id: str, more: Mapping[str, Any] | None = None) -> None:
        self.detail = detail
        self.request_id = request_id
        self.more = more or {}
        """The problem JSON of the admin API: `problems`, `findings`, `current`."""


class Page:
    """A request of an operator. `session` is None before the log-in."""

    def __init__(self, console: Console, request: Request, session: Session | None) -> None:
        self.console = console
        self.request = request
        self._session = session
        self.request_id: str = request.scope.get(REQUEST_ID, "")
        self.nonce = secrets.token_urlsafe(16)
        """For the styles that a vendored script adds; see the Content-Security-Policy."""
        self.form: Mapping[str, str] = {}
        """The fields of a POST."""
        if session is not None:
            self.api = AdminClient(console.admin, session.token)

    @property
    def session(self) -> Session:
        """The operator's session."""
        if self._session is None:
            raise RuntimeError("the operator has not logged in")
        return self._session

    @property
    def logged_in(self) -> bool:
        """True if an operator has logged in."""
        return self._session is not None

    @property
    def can_change(self) -> bool:
        """True if the operator may change something."""
        return self._session is not None and self._session.can_change

    @property
    def path(self) -> str:
        """The path of the request."""
        path: str = self.request.scope["path"]
        return path

    @property
    def is_partial(self) -> bool:
        """True if htmx asks for a part of the page."""
        return self.request.headers.get("hx-request") == "true"

    @property
    def done(self) -> str:
        """The message about the last change; empty if there was none."""
        return DONE.get(self.query("done"), "")

    def query(self, name: str, default: str = "") -> str:
        """Return a field of the query, without blanks around it."""
        return self.request.query_params.get(name, default).strip()

    def whole(self, name: str) -> int:
        """Return a whole number of the query; 0 if it is none."""
        text = self.query(name)
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0

    def render(self, template: str, status: int = 200, **values: Any) -> Response:
        """Return a template as the response. It has `page`, and `problem` (None) by default."""
        values = {"page": self, "problem": None, **values}
        text = self.console.templates.get_template(template).render(values)
        return HTMLResponse(text, status, {"Content-Security-Policy": policy(self.nonce)})

    def redirect(self, path: str, done: str = "", **query: Any) -> Response:
        """Return the redirect after a change. `done` is a key of DONE."""
        query = {**query, "done": done}
        if self.is_partial:
            return Response(status_code=204, headers={"HX-Redirect": url(path, **query)})
        return RedirectResponse(url(path, **query), 303)

    def set_secret(
        self, response: Response, name: str, secret: str, *, seconds: int, path: str
    ) -> None:
        """Give the browser a secret that no script can read and no other site sends."""
        response.set_cookie(
            name,
            secret,
            max_age=seconds,
            path=path,
            secure=is_https(self),
            httponly=True,
            samesite="strict",
        )

    def problem_of(self, error: ApiProblem) -> Problem:
        """Return a problem of the admin API, for a template."""
        return Problem(error.detail, self.request_id, error.problem)

    def problem(self, detail: str) -> Problem:
        """Return a problem that the console has found itself."""
        return Problem(detail, self.request_id)

    def failed(self, status: int, detail: str) -> Response:
        """Return the error page."""
        return self.failed_with(status, self.problem(detail))

    def failed_with(self, status: int, problem: Problem) -> Response:
        """Return the error page; for a part of a page only the problem."""
        template = "problem.html" if self.is_partial else "error.html"
        return self.render(template, status, problem=problem, failed=status)


View = Callable[[Page], Awaitable[Response]]


def view(path: str, handle: View, *methods: str, changes: bool = True) -> Route:
    """Return the route of a page for operators. `methods` is GET unless given.

    A POST is for operators who may change something, unless it only asks (`changes=False`). The
    admin API rejects the changes of a reader, too; here no route can forget it.
    """

    async def handled(request: Request) -> Response:
        console: Console = request.app.state.console
        page = console.page(request, await session_of(request))
        if not page.logged_in:
            return _must_log_in(page)
        try:
            if request.method == "POST":
                check_role(page, changes=changes)
                page.form = await form_of(request, f"{ROOT}{path}", page.session.token)
                check_form(page)
            return await handle(page)
        except FormRejected as error:
            return page.failed(error.status, str(error))
        except ApiProblem as error:
            return page.failed_with(error.status, page.problem_of(error))

    return Route(f"{ROOT}{path}", handled, methods=list(methods or ("GET",)), name=path or "/")


async def session_of(request: Request) -> Session | None:
    """Return the session of a request; None if it has none."""
    console: Console = request.app.state.console
    secret = request.cookies.get(COOKIE)
    if secret is None:
        return None
    return await asyncio.to_thread(console.sessions.find, secret, console.context.tokens)


def _must_log_in(page: Page) -> Response:
    """Return the answer to a request without a session.

    A browser sends no cookie (SameSite=Strict) if a link of another site, such as a wiki, leads to
    the console. A page of the console that loads the same URL again gets the cookie.
    """
    asked = page.request.url.path
    if page.request.url.query:
        asked += f"?{page.request.url.query}"
    login = url(f"{ROOT}/login", next=asked if page.request.method == "GET" else "")
    if page.is_partial:
        return Response(status_code=401, headers={"HX-Redirect": login})
    if page.request.method == "GET":
        if page.request.headers.get("sec-fetch-site") == "cross-site":
            return page.render("reload.html")
        return RedirectResponse(login, 303)
    return page.failed(
        401,
        "Your session has ended, so nothing was changed. Log in again, then send the form again.",
    )


# ── Forms ──────────────────────────────────────────────────────────────────────────────────────


class FormRejected(Exception):
    """A form cannot be accepted."""

    def __init__(self, status: int, detail: str) -> None:
        self.status = status
        super().__init__(detail)


_FORM_PROBLEMS: Final = {
    "BODY_TOO_LARGE": "The form is too large.",
    "BODY_TOO_SLOW": "The form did not arrive in time; send it again.",
    "BODY_INCOMPLETE": "The connection closed before the whole form arrived.",
    "BODY_IN_SMALL_PARTS": "The form arrived in too many small parts; send it in one piece.",
    "TOO_MANY_BODIES": "Too many forms are arriving; send it again.",
}


async def form_of(request: Request, path: str, token: Token) -> dict[str, str]:
    """Return the fields of a form of a route, which is declared as `path`. Raises FormRejected.

    A long form waits for its turn among the heavy work of the worker, with this token.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise FormRejected(415, "The console accepts forms only.")
    console: Console = request.app.state.console
    bytes_max = body_bytes_max("POST", path)
    try:
        form = await console.context.bodies.read_in_time(
            request.receive, dict(request.scope["headers"]), bytes_max
        )
        # A document of megabytes takes a tenth of a second: the worker answers checks meanwhile.
        async with console.heavy.turn(token, form):
            return await asyncio.to_thread(_fields, form)
    except BodyRejected as error:
        raise FormRejected(error.status, _FORM_PROBLEMS[error.code]) from None
    except Busy:
        raise FormRejected(429, "This worker is busy; send the form again in a second.") from None
    except ValueError:
        raise FormRejected(400, "The form is not valid UTF-8, or has too many fields.") from None


def _fields(form: bytes) -> dict[str, str]:
    """Return the fields of a form. Raises ValueError."""
    if not form.isascii() or form.count(b"&") >= FORM_FIELDS_MAX:
        raise ValueError
    pairs = (field.partition(b"=")[::2] for field in form.split(b"&") if field)
    # Browsers send line breaks as CR LF.
    return {_decoded(name): _decoded(value).replace("\r\n", "\n") for name, value in pairs}


def _decoded(given: bytes) -> str:
    """Return a name or a value of a form as text. Raises ValueError."""
    decoded = bytearray()
    begin = 0
    while begin < len(given):
        end = begin + SLICE_BYTES
        # An escape has three characters. A slice ends before one that it would cut.
        cut = given.rfind(b"%", end - 2, end) if end < len(given) else -1
        end = end if cut < 0 else cut
        decoded += unquote_to_bytes(given[begin:end].replace(b"+", b" "))
        begin = end
    return decoded.decode()


def is_own_origin(request: Request) -> bool:
    """Return True if a POST comes from a page of the console itself, as far as its headers show.

    A browser sends `Origin` with every POST, and newer ones `Sec-Fetch-Site`. Only the host is
    compared: behind a proxy that ends TLS, the service does not know the scheme.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    same = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    return site in {"same-origin", "none"} and same


def check_role(page: Page, *, changes: bool) -> None:
    """Raise FormRejected if the form changes something and the operator may not do so."""
    if changes and not page.can_change:
        raise FormRejected(
            403,
            "Your role is read, so you may not change anything, and nothing was changed. Log in "
            "with a token of the role admin.",
        )


def check_form(page: Page) -> None:
    """Raise FormRejected unless a form of this session was sent."""
    given = page.form.get("csrf") or page.request.headers.get("x-csrf-token", "")
    right = hmac.compare_digest(given.encode("utf-8", "replace"), page.session.csrf.encode("ascii"))
    if not right or not is_own_origin(page.request):
        raise FormRejected(
            403,
            "The form does not belong to this session, so nothing was changed. Open the page "
            "again, and send the form from there.",
        )


# ── For templates ──────────────────────────────────────────────────────────────────────────────


def is_https(page: Page) -> bool:
    """Return True if the browser uses https, also towards a trusted proxy that ends TLS."""
    request = page.request
    if request.url.scheme == "https":
        return True
    first = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    from_proxy = page.console.context.identity.is_from_proxy(AsgiRequest(request.scope))
    return first == "https" and from_proxy


def policy(nonce: str) -> str:
    """Return the Content-Security-Policy of a page: nothing but files of this service."""
    return (
        "default-src 'none'; script-src 'self'; "
        f"style-src 'self' 'nonce-{nonce}'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def url(path: str, **query: Any) -> str:
    """Return the URL of a page. A field that is None or empty is left out; a list is repeated.

    >>> url("/console/audit", author="a&b", key="", part=[1, 2])
    '/console/audit?author=a%26b&part=1&part=2'
    """
    given = {
        name.rstrip("_"): value
        for name, value in query.items()
        if value is not None and value not in ("", [])
    }
    return f"{quote(path)}?{urlencode(given, doseq=True)}" if given else quote(path)


def number(value: float | None, digits: int = 0) -> str:
    """Return a number for people; a dash if it is unknown.

    >>> number(1234567), number(0.123, 2), number(None)
    ('1,234,567', '0.12', '–')
    """
    return "–" if value is None else f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """Return a time for people, in its two largest units.

    >>> [duration(each) for each in (0, 0.25, 59.2, 61, 7200, 90000)]
    ['0 s', '0.3 s', '1 min', '1 min 1 s', '2 h', '1 d 1 h']
    """
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 10) / 10} s"
    whole = math.ceil(seconds)
    for size, name, below, lower in _UNITS:
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name} {rest} {lower}" if rest else f"{whole // size} {name}"
    return f"{whole} s"


def limit_text(limit: str | Mapping[str, Any]) -> str:
    """Return a limit of a document as one line.

    >>> limit_text("10/second"), limit_text({"limit": 5, "per": "90s", "algorithm": "leaky_bucket"})
    ('10/second', '5/90s, algorithm leaky_bucket')
    """
    if isinstance(limit, str):
        return limit
    rest = {name: value for name, value in limit.items() if name not in {"limit", "per"}}
    words = [f"{name.replace('_', ' ')} {value}" for name, value in rest.items()]
    return ", ".join([f"{limit['limit']}/{limit['per']}", *words])


def time_element(value: datetime | str | float | None) -> Markup:
    """Return a time as an element that shows UTC; a script shows the viewer's zone instead.

    >>> print(time_element(0))
    <time datetime="1970-01-01T00:00:00Z" title="1970-01-01 00:00:00 UTC">1970-01-01 00:00:00</time>
    """
    if value is None:
        return Markup("–")
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        value = datetime.fromtimestamp(value, UTC)
    shown = value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "seconds")
    machine = shown.replace(" ", "T")
    return Markup('<time datetime="{0}Z" title="{1} UTC">{1}</time>').format(machine, shown)


def json_of(value: Any) -> str:
    """Return JSON for a data attribute or an event of the live stream, on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
