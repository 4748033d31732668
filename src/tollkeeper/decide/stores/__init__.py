"""Stores by URI. Only this module knows which scheme is which store.

memory://                    this process, a million states
memory://?capacity=50000     this process, at most so many states
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from tollkeeper.clock import Clock
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores.memory import STATES_MAX_DEFAULT, PythonMemoryStore
from tollkeeper.errors import ConfigError

CAPACITY_MAX: Final = 1_000_000_000


def open_store(uri: str, clock: Clock) -> Store:
    """The store that a URI names. Raises ConfigError, or StoreUnavailable if it cannot be had."""
    if not isinstance(uri, str):
        raise ConfigError(f'store={uri!r} is not a URI or a store; try store="memory://"')
    parts = urlsplit(uri)
    opener = _OPENERS.get(parts.scheme)
    if opener is None or "://" not in uri:
        known = ", ".join(f"{scheme}://" for scheme in _OPENERS)
        raise ConfigError(f"store={uri!r} has no known scheme; there are {known}")
    return opener(uri, parts, clock)


def _open_memory(uri: str, parts: SplitResult, clock: Clock) -> Store:
    if parts.netloc or parts.path.strip("/"):
        raise ConfigError(
            f"store={uri!r}: memory:// is this process and has no address; "
            f'write "memory://" or "memory://?capacity=50000"'
        )
    options = _options(uri, parts, {"capacity": STATES_MAX_DEFAULT})
    return PythonMemoryStore(clock, options["capacity"])


def _options(uri: str, parts: SplitResult, defaults: Mapping[str, int]) -> dict[str, int]:
    """The query's options, each a whole number from 1 up."""
    options = dict(defaults)
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in defaults:
            raise ConfigError(
                f"store={uri!r} has no option {name!r}; there are {', '.join(defaults)}"
            )
        plain = text.replace("_", "")
        if not plain.isascii() or not plain.isdigit() or not 1 <= int(plain[:12]) <= CAPACITY_MAX:
            raise ConfigError(
                f"store={uri!r}: {name}={text!r} is not a whole number from 1 to "
                f"{CAPACITY_MAX:,}; for example {name}={defaults[name]}"
            )
        options[name] = int(plain)
    return options


_OPENERS: Final[dict[str, Callable[[str, SplitResult, Clock], Store]]] = {
    "memory": _open_memory,
}
