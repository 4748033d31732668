"""What a Django site's settings say of its limits, opened when they are first asked.

    TOLLKEEPER = {"limits": "100/minute", "store": "shared:///run/site.limits"}

The names are those of `Terms`. A wrong setting stops the start, with its name in the message.

There is one store, and two guards on it: for threads, and for the event loop. A view's limits may
be shared by both kinds of view, so both must count in one place.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from tollkeeper.core.clock import clock_of
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.web.django_request import run
from tollkeeper.web.guard import AsyncGuard, Guard, Terms
from tollkeeper.web.terms import HOOKS, plain

try:
    from asgiref.sync import async_to_sync, iscoroutinefunction
    from django import conf  # type: ignore[import-untyped]  # has none
    from django.core.signals import setting_changed  # type: ignore[import-untyped]  # has none
    from django.utils import module_loading  # type: ignore[import-untyped]  # has none
except ImportError as error:
    raise ConfigError(
        f"limits for Django need Django ({error}); "
        f"install it with: pip install 'tollkeeper[django]'"
    ) from error

SETTING: Final = "TOLLKEEPER"
# A site has limits or rules; a limiter could be for threads or for asyncio, but not for both.
NAMES: Final = tuple(field.name for field in fields(Terms) if field.name != "limiter")


class Desk:
    """The site's limits, opened when they are first asked: one store, a guard for either kind."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._guard: Guard | None = None
        self._async_guard: AsyncGuard | None = None

    @property
    def guard(self) -> Guard:
        """For threads."""
        if self._guard is None:
            with self._lock:
                self._guard = self._guard or Guard(for_threads(self._on_store()))
        return self._guard

    @property
    def async_guard(self) -> AsyncGuard:
        """For the event loop."""
        if self._async_guard is None:
            with self._lock:
                self._async_guard = self._async_guard or AsyncGuard(self._on_store())
        return self._async_guard

    def _on_store(self) -> Terms:
        if not isinstance(self.terms.store, str):
            return self.terms
        if self._store is None:
            self._store = open_store(self.terms.store, clock_of(self.terms.clock))
        return replace(self.terms, store=self._store)

    def close(self) -> None:
        """Close what was opened."""
        with self._lock:
            if self._guard is not None:
                self._guard.close()
            if self._async_guard is not None:
                run(self._async_guard.close())
            if self._store is not None:
                self._store.close()
            self._store = self._guard = self._async_guard = None


_desks: Final[list[Desk]] = []  # one, or none until it is asked for
_desks_lock: Final = threading.Lock()


def desk() -> Desk:
    """The site's limits as settings.TOLLKEEPER says. Raises ConfigError."""
    with _desks_lock:
        if not _desks:
            _desks.append(Desk(terms_of(getattr(conf.settings, SETTING, {}))))
        return _desks[0]


def for_threads(terms: Terms) -> Terms:
    """The terms with hooks that a thread can call: an async one runs in the loop meanwhile."""
    hooks = {name: getattr(terms, name) for name in HOOKS}
    awaited: dict[str, Any] = {
        name: async_to_sync(hook) for name, hook in hooks.items() if iscoroutinefunction(hook)
    }
    return plain(replace(terms, **awaited) if awaited else terms)


def terms_of(setting: object) -> Terms:
    """The terms that a setting stands for."""
    example = f'{SETTING} = {{"limits": "100/minute", "store": "shared:///run/site.limits"}}'
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"settings.{SETTING}={show(setting)} is not a dict; for example {example}"
        )
    wrong = sorted(str(name) for name in setting if name not in NAMES)
    if wrong:
        raise ConfigError(
            f"settings.{SETTING} has {', '.join(wrong)}; it can have {', '.join(NAMES)}"
        )
    try:
        return Terms(**{name: _loaded(name, value) for name, value in setting.items()})
    except ConfigError as error:
        raise ConfigError(f"settings.{SETTING}: {error}") from error


def _loaded(name: str, value: Any) -> Any:
    """A function that the setting names by its path, as Django's own do; else what it is."""
    if name not in HOOKS or not isinstance(value, str) or ":" in value or "." not in value:
        return value
    try:
        return module_loading.import_string(value)
    except ImportError as error:
        raise ConfigError(f"{name}={show(value)} cannot be imported: {error}") from error


def _forget(*, setting: str, **_: object) -> None:
    """After `override_settings` in a test, the next request reads the setting again."""
    if setting == SETTING:
        with _desks_lock:
            closing = [_desks.pop() for _ in range(len(_desks))]
        for each in closing:
            each.close()


setting_changed.connect(_forget, dispatch_uid="tollkeeper")
