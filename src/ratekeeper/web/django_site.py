"""The limits of a Django site: its settings, its requests, and their charges.

    RATEKEEPER = {"limits": "100/minute", "store": "shared:///run/site.limits"}

The names are those of `EnforcerOptions`. A wrong setting stops the start, and the message names it.

**Two enforcers.** A site has one store and two enforcers on it: one for threads, one for the event
loop. Sync and async views may share limits, so both enforcers must count in one place.

**Threads and the loop.** Django serves a request partly in the event loop and partly in threads, so
a charge may be made in one and settled in the other. `DjangoCharges` settles each charge with the
enforcer that made it, and never blocks the loop: it runs sync code in a thread, and a thread runs
async code in the loop.

**Sessions.** A session may be in a database, and Django refuses to read one in the event loop.
There a request has a placeholder instead. If a key needs the session, it is read in a thread, and
the key is computed again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NoReturn
from weakref import WeakSet

from ratekeeper.core.clock import clock_of
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.steps import Call, Steps, run_async
from ratekeeper.decide.store import Store
from ratekeeper.limiter.arguments import name_of
from ratekeeper.web.charges import DeferringCharges
from ratekeeper.web.enforcer import AsyncEnforcer, Charge, Enforcer, EnforcerCore
from ratekeeper.web.options import (
    HOOKS,
    OPTION_NAMES,
    EnforcerOptions,
    check_option_names,
    opened_store,
)
from ratekeeper.web.overrides import mark_override, override_count
from ratekeeper.web.requests import WebRequest, WsgiRequest, quoted_path

try:
    from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
    from django import conf  # type: ignore[import-untyped]  # has none
    from django.contrib.admindocs.utils import (  # type: ignore[import-untyped]  # has none
        replace_metacharacters,
        replace_named_groups,
        replace_unnamed_groups,
    )
    from django.core.signals import setting_changed  # type: ignore[import-untyped]  # has none
    from django.urls import Resolver404, get_resolver, resolve  # type: ignore[import-untyped]  # has none
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


class SiteLimits:
    """The limits of the site: one store, and two enforcers that are opened on first use."""

    def __init__(self, options: EnforcerOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._owns_store = False
        self._enforcer: Enforcer | None = None
        self._async_enforcer: AsyncEnforcer | None = None

    @property
    def enforcer(self) -> Enforcer:
        """The enforcer for threads."""
        if self._enforcer is None:
            with self._lock:
                self._enforcer = self._enforcer or Enforcer(for_threads(self._with_store()))
        return self._enforcer

    @property
    def async_enforcer(self) -> AsyncEnforcer:
        """The enforcer for the event loop."""
        if self._async_enforcer is None:
            with self._lock:
                self._async_enforcer = self._async_enforcer or AsyncEnforcer(self._with_store())
        return self._async_enforcer

    def _with_store(self) -> EnforcerOptions:
        if self.options.limiter is not None:
            return self.options
        if self._store is None:
            clock = clock_of(self.options.clock)
            self._store, self._owns_store = opened_store(self.options, clock)
        return replace(self.options, store=self._store)

    def close(self) -> None:
        """Close the enforcers and the store."""
        with self._lock:
            if self._enforcer is not None:
                self._enforcer.close()
            if self._async_enforcer is not None:
                run_in_loop(self._async_enforcer.close())
            if self._store is not None and self._owns_store:
                self._store.close()
            self._store = self._enforcer = self._async_enforcer = None


_opened: Final[list[SiteLimits]] = []  # at most one
_opened_lock: Final = threading.Lock()


def site_limits() -> SiteLimits:
    """Return the limits that settings.RATEKEEPER defines. Raises ConfigError."""
    with _opened_lock:
        if not _opened:
            _opened.append(SiteLimits(options_of(getattr(conf.settings, SETTING, {}))))
        return _opened[0]


def for_threads(options: EnforcerOptions) -> EnforcerOptions:
    """Return options whose hooks a thread can call: async hooks run in the event loop."""
    hooks = {name: getattr(options, name) for name in HOOKS}
    wrapped: dict[str, Any] = {
        name: async_to_sync(hook) for name, hook in hooks.items() if iscoroutinefunction(hook)
    }
    return (replace(options, **wrapped) if wrapped else options).require_plain_hooks()


def options_of(setting: object) -> EnforcerOptions:
    """Return the options that a setting defines."""
    example = f'{SETTING} = {{"limits": "100/minute", "store": "shared:///run/site.limits"}}'
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"settings.{SETTING}={show(setting)} is not a dict; for example {example}"
        )
    check_option_names(f"settings.{SETTING}", setting, NAMES)
    try:
        return EnforcerOptions(**{name: _loaded(name, value) for name, value in setting.items()})
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

    def __getitem__(self, name: str) -> NoReturn:
        raise _SessionNeeded

    def __iter__(self) -> NoReturn:
        raise _SessionNeeded

    def __len__(self) -> NoReturn:
        raise _SessionNeeded


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


# ── Views that replace the limits of the site ──────────────────────────────────────────────────

# The owner of the limits that a view with `rate_limit(…, override_defaults=True)` replaces.
SITE: Final = "site"
# The names of such views. Not the views: `method_decorator` decorates functions that it drops.
_overriding: Final[set[str]] = set()
# URL configurations that have been loaded: only then are the views of the site known.
_loaded_urls: Final[WeakSet[Any]] = WeakSet()


def note_override(view: Any) -> None:
    """Note that the limits of a view replace those of the site."""
    mark_override(view, SITE)
    _overriding.add(name_of(view))


def override_count_of(request: Any) -> int:
    """Return the number of limits of the serving view that replace the limits of the site."""
    # The first request loads the views. A site without such a view then pays nothing.
    resolver = get_resolver(getattr(request, "urlconf", None))
    if not _overriding and resolver in _loaded_urls:
        return 0
    try:
        view = resolver.resolve(request.path_info).func
    except Exception:  # no route, or a converter failed: Django reports that, and it is counted
        return 0
    finally:
        _loaded_urls.add(resolver)
    return override_count(view, SITE, str(request.method))


# ── Charges ────────────────────────────────────────────────────────────────────────────────────


class DjangoCharges(DeferringCharges):
    """The charges of one request, some made in threads and some in the event loop."""

    __slots__ = ()

    def settle(self) -> None:
        """Apply the cost of the request so far, from sync code."""
        for enforcer, charge in self.unsettled():
            if isinstance(enforcer, AsyncEnforcer):
                run_in_loop(enforcer.leave(charge, self.status))
            else:
                enforcer.leave(charge, self.status)

    async def settle_async(self) -> None:
        """Do the same from async code."""
        for enforcer, charge in self.unsettled():
            if isinstance(enforcer, AsyncEnforcer):
                await enforcer.leave(charge, self.status)
            else:
                await sync_to_async(enforcer.leave)(charge, self.status)

    async def settle_shielded(self) -> None:
        """Settle even if the task is cancelled, as when the client closes the connection."""
        if any(isinstance(enforcer, AsyncEnforcer) for enforcer, _ in self.unsettled()):
            await asyncio.shield(self.settle_async())
        else:
            # Threads are not cancelled. Under WSGI, where all enforcers are for threads, this must
            # run in the view's own task: asgiref before 3.8 uses the task to find the thread that
            # waits for it, and from another task it would deadlock.
            await self.settle_async()

    async def denial_async(
        self, enforcer: Enforcer | AsyncEnforcer, request: DjangoWebRequest
    ) -> Any:
        """Charge the request from async code, by an Enforcer in a thread. See `denial`."""
        if isinstance(enforcer, Enforcer):
            return await sync_to_async(self.denial)(enforcer, request)
        request.leave_session_unread()
        return await run_async(self.denial_steps(enforcer, request))

    def _enter_steps(self, enforcer: EnforcerCore, request: WebRequest) -> Steps[Charge]:
        try:
            return (yield from enforcer.enter_steps(request))
        except _SessionNeeded:  # raised before anything was charged
            assert isinstance(request, DjangoWebRequest)  # noqa: S101 - only it raises this
            yield Call(sync_to_async(request.read_session))
            return (yield from enforcer.enter_steps(request))


settling: Final[set[asyncio.Future[None]]] = set()  # the loop keeps no reference to its tasks


def run_in_loop(leaving: Awaitable[None]) -> None:
    """Run an awaitable from sync code, in a thread or in the event loop."""

    async def left() -> None:
        await leaving

    if not in_event_loop():
        # A thread of Django: asgiref runs this in the loop that waits for the thread.
        async_to_sync(left)()
        return
    task = asyncio.ensure_future(left())
    settling.add(task)
    task.add_done_callback(settling.discard)


def in_event_loop() -> bool:
    """Return True if this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
