"""The limits of a Django site: its settings, its requests, and their sessions.

    RATEKEEPER = {"limits": "100/minute", "store": "shared:///run/site.limits"}

The names are those of `EnforcerOptions`. A wrong setting stops the start, and the message names it.

**Threads and the loop.** Django serves a request partly in the event loop and partly in threads, so
a charge may be made in one and settled in the other. The enforcer of the site has a limiter for
each (`Limiters`). An async hook becomes an Ask: a thread has the loop run it.

**Sessions.** A session may be in a database, and Django refuses to read one in the event loop.
There a request has a placeholder instead. If a key needs the session, it is read in a thread, and
the key is computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final, NoReturn

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.steps import Ask, Call, Steps
from ratekeeper.limiter.arguments import check_names, kind_of
from ratekeeper.web.charges import RequestCharges
from ratekeeper.web.enforcer import Charge, Enforcer
from ratekeeper.web.options import HOOKS, OPTION_NAMES, EnforcerOptions
from ratekeeper.web.requests import WebRequest, WsgiRequest, quoted_path

try:
    from asgiref.sync import async_to_sync, sync_to_async
    from django import conf  # type: ignore[import-untyped]  # has none
    from django.contrib.admindocs.utils import (  # type: ignore[import-untyped]  # has none
        replace_metacharacters,
        replace_named_groups,
        replace_unnamed_groups,
    )
    from django.core.signals import setting_changed  # type: ignore[import-untyped]  # has none
    from django.urls import Resolver404, resolve  # type: ignore[import-untyped]  # has none
    from django.utils import module_loading  # type: ignore[import-untyped]  # has none
except ImportError as error:
    raise ConfigError(
        f"limits for Django need Django ({error}); "
        f"install it with: pip install 'ratekeeper[django]'"
    ) from error

SETTING: Final = "RATEKEEPER"
# Without `limiter`: a limiter is for threads or for asyncio, and a site needs both.
NAMES: Final = tuple(name for name in OPTION_NAMES if name != "limiter")
# Routes whose template is cached; a site has about as many as it has views.
ROUTES_MAX: Final = 4_096


# ── Settings ───────────────────────────────────────────────────────────────────────────────────


_opened: Final[list[Enforcer]] = []  # at most one
_opened_lock: Final = threading.Lock()


def site_enforcer() -> Enforcer:
    """Return the enforcer of the limits that settings.RATEKEEPER defines. Raises ConfigError."""
    with _opened_lock:
        if not _opened:
            _opened.append(Enforcer(options_of(getattr(conf.settings, SETTING, {}))))
        return _opened[0]


def for_threads_and_loops(options: EnforcerOptions) -> EnforcerOptions:
    """Return options whose async hooks a thread can call, too: the event loop runs them."""
    hooks = {name: getattr(options, name) for name in HOOKS}
    wrapped: dict[str, Any] = {
        name: _asking(hook)
        for name, hook in hooks.items()
        if callable(hook) and kind_of(hook) == "coroutine"
    }
    return (replace(options, **wrapped) if wrapped else options).require_plain_hooks()


def _asking(hook: Callable[..., Any]) -> Callable[..., Ask]:
    async def awaited(*args: Any) -> Any:
        return await hook(*args)

    return partial(Ask, async_to_sync(awaited), hook)


def options_of(setting: object) -> EnforcerOptions:
    """Return the options that a setting defines."""
    example = f'{SETTING} = {{"limits": "100/minute", "store": "shared:///run/site.limits"}}'
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"settings.{SETTING}={show(setting)} is not a dict; for example {example}"
        )
    check_names(f"settings.{SETTING}", setting, NAMES)
    try:
        options = EnforcerOptions(**{name: _loaded(name, value) for name, value in setting.items()})
        return for_threads_and_loops(options)
    except ConfigError as error:
        raise ConfigError(f"settings.{SETTING}: {error}") from error


def _loaded(name: str, value: Any) -> Any:
    """Import a hook that is given by its dotted path; return any other value as it is."""
    if name not in HOOKS or not isinstance(value, str) or ":" in value or "." not in value:
        return value
    if name == "limits" and not all(part.isidentifier() for part in value.split(".")):
        return value  # a rate such as 5/1.5s
    try:
        return module_loading.import_string(value)
    except ImportError as error:
        raise ConfigError(f"{name}={show(value)} cannot be imported: {error}") from error


def _forget(*, setting: str, **_: object) -> None:
    """Close the limits after `override_settings`; the next request reads the setting again."""
    if setting == SETTING:
        with _opened_lock:
            closing = [_opened.pop() for _ in range(len(_opened))]
        for each in closing:
            each.close()


setting_changed.connect(_forget, dispatch_uid="ratekeeper")


# ── Requests ───────────────────────────────────────────────────────────────────────────────────


class _SessionNeeded(Exception):
    """The session is needed in the event loop, where it cannot be read because that is I/O."""


class _UnreadSession(Mapping[str, Any]):
    """Stands for a session that has not been read."""

    def _raise(self, *_: object) -> NoReturn:
        raise _SessionNeeded

    __getitem__ = __iter__ = __len__ = _raise


_UNREAD: Final = _UnreadSession()


class DjangoWebRequest(WsgiRequest):
    """A WebRequest over a request of Django, under WSGI or ASGI."""

    __slots__ = ("_is_resolved", "_route")

    def __init__(self, request: Any) -> None:
        path = quoted_path(request.path.encode("utf-8", "surrogatepass"))
        super().__init__(request.META, request, getattr(request, "session", None), path=path)
        self._is_resolved = False

    def leave_session_unread(self) -> None:
        """Replace the session by a placeholder, for use in the event loop."""
        if self.session is not None:
            self.session = _UNREAD

    def read_session(self) -> None:
        """Read the session from its storage."""
        self.session = self.native.session
        self.native.session.keys()

    @property
    def route(self) -> str | None:
        """The route, also before Django has resolved it; None if no route matches."""
        if not self._is_resolved:
            self._route = _route_of(self.native)
            self._is_resolved = True
        return self._route

    @route.setter
    def route(self, route: str | None) -> None:
        self._route = route


def _route_of(request: Any) -> str | None:
    match = request.resolver_match
    if match is None:
        try:
            match = resolve(request.path_info, getattr(request, "urlconf", None))
        except Resolver404:
            return None
    return template_of(match.route)


@lru_cache(ROUTES_MAX)
def template_of(route: str) -> str:
    """Return a route in the form that rules use.

    >>> template_of("users/<int:id>/"), template_of("api/^users/(?P<id>[0-9]+)/$")
    ('/users/<int:id>/', '/api/users/<id>/')
    """
    if any(sign in route for sign in "^$(\\"):
        route = replace_unnamed_groups(replace_named_groups(route))
        route = replace_metacharacters(route)
    return f"/{route.lstrip('/')}"


# ── Charges ────────────────────────────────────────────────────────────────────────────────────


class DjangoCharges(RequestCharges):
    """The charges of one request, some made in threads and some in the event loop."""

    __slots__ = ()

    def _making(self, enforcer: Enforcer, request: WebRequest) -> Steps[Charge]:
        try:
            return (yield from super()._making(enforcer, request))
        except _SessionNeeded:  # raised before anything was charged
            assert isinstance(request, DjangoWebRequest)  # noqa: S101 - only it raises this
            yield Call(sync_to_async(request.read_session))
            return (yield from super()._making(enforcer, request))
