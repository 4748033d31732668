"""Stores by URI. Only this module knows which scheme is which store.

    memory://                        this process; room for a million states
    memory://?capacity=50000         this process; room for so many
    shared:///run/api.limits         every process that opens this file, exactly
    shared:///run/api.limits?capacity=50000&log_bytes=4194304
    shared:///run/api.limits?allowances=1000000
                                     with room for so many allowances of a node in a fleet
    shared:///run/api.limits?mode=660
                                     also processes of other users in the file's group
    redis://localhost                every machine; also rediss://, redis+sentinel://,
                                     redis+cluster://, and each as valkey

`LocalOptions` describes the options; those of a Redis URI are in `redis/config.py`. A file keeps
the sizes that it was made with. With `shared://`, allowances are in a second file, such as
`/run/api.limits.allowances`. A file that another user owns, or that the group or every user can
write, is rejected unless `mode` allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast
from urllib.parse import SplitResult, unquote, urlsplit

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.errors import ConfigError, StoreUnavailable, show
from ratekeeper.decide import kernel
from ratekeeper.decide.allowances import ALLOWANCES_MAX_DEFAULT
from ratekeeper.decide.store import LocalStore, Store, StoreStats
from ratekeeper.decide.stores.memory import STATES_MAX_DEFAULT, PythonMemoryStore
from ratekeeper.decide.stores.options import (
    Option,
    choice,
    option,
    options_of,
    query_options,
    read_options,
    whole,
)
from ratekeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from ratekeeper.decide.stores.redis.config import parse as parse_redis
from ratekeeper.decide.stores.workers import warn_of_several_workers

Options = dict[str, object]
_NUMBER: Final = whole(1, 1_000_000_000, "50000")


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The options of a store on this machine; 0 where none is given."""

    capacity: int = option(
        _NUMBER, "", "number of states that fit: one limit of one key; by default a million", 0
    )
    log_bytes: int = option(
        _NUMBER, "", "bytes for sliding window logs; by default 64 for each state", 0
    )
    allowances: int = option(
        _NUMBER, "", "subjects that a node of a fleet decides at a time; by default 100,000", 0
    )
    mode: int = option(
        choice({"600": 0o600, "660": 0o660, "666": 0o666}, "660"),
        "600",
        "of a new file: this user, also its group (`660`), or every user (`666`) may use it",
    )


SHARED_OPTIONS: Final = options_of(LocalOptions)
MEMORY_OPTIONS: Final = {name: each for name, each in SHARED_OPTIONS.items() if name != "mode"}


def open_store(uri: str, clock: Clock | None = None, **options: object) -> Store:
    """Open the store of a URI, to share it between limiters or to pass options as arguments.

    >>> store = open_store("memory://", capacity=50_000)
    >>> store.stats().states
    0

    `options` are those of the URI's query, and take precedence over it: a password does not belong
    in a URI. Raises ConfigError, or StoreUnavailable if the store cannot be opened. The first check
    connects to Redis. Logs a warning for `memory://` in one of several workers of a web server.
    """
    store = open_fallback_store(uri, clock, **options)
    if store.is_private:
        warn_of_several_workers()
    return store


def open_fallback_store(uri: str, clock: Clock | None = None, **options: object) -> Store:
    """Open a store as `open_store` does, without a warning: a local fallback may be private."""
    clock = clock or SystemClock()
    if not isinstance(uri, str):
        raise ConfigError(f'store={show(uri)} is not a URI or a store; try store="memory://"')
    scheme, separator, _ = uri.partition("://")
    opener = _OPENERS.get(scheme.lower())
    if opener is None or not separator:
        known = ", ".join(f"{each}://" for each in _OPENERS)
        # An unknown text is not shown, because it may contain a password.
        shown = repr(scheme) if scheme.isidentifier() else "…"
        hint = ""
        if scheme.lower().startswith(("ratekeeper+", "async+ratekeeper+")):
            hint = "; leave out ratekeeper+, which only a storage_uri of limits has"
        raise ConfigError(f"store={shown} has no known scheme; there are {known}{hint}")
    return opener(uri, clock, options)


def open_local_store(uri: str, clock: Clock | None = None) -> LocalStore:
    """Open a store in the memory of this machine, without a warning. Raises as `open_store`."""
    opened = open_fallback_store(uri, clock)
    if not opened.is_local:
        opened.close()
        raise ConfigError(f"store={show(uri)} is not on this machine; try memory:// or shared://")
    return cast("LocalStore", opened)


def store_of(store: str | Store, clock: Clock | None = None) -> Store:
    """Return `store` itself, or open the store that a URI names."""
    return store if isinstance(store, Store) else open_store(store, clock)


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f'store={uri!r} is not a URI: {error}; try "memory://"') from None


def _open_memory(uri: str, clock: Clock, given: Options) -> Store:
    parts = _split(uri)
    if parts.netloc or parts.path.strip("/"):
        raise ConfigError(
            f"store={uri!r}: memory:// is this process and has no address; "
            f'write "memory://" or "memory://?capacity=50000"'
        )
    read = _options(MEMORY_OPTIONS, uri, parts, given)
    if not kernel.BUILT:
        capacity = read.capacity or STATES_MAX_DEFAULT
        store = PythonMemoryStore(clock, capacity, read.allowances or ALLOWANCES_MAX_DEFAULT)
        return switches.forgetting(store)
    return switches.forgetting(_kernel_store(clock, None, read))


def _open_shared(uri: str, clock: Clock, given: Options) -> Store:
    return _kernel_store(clock, *_shared_file(uri, given))


def examine_shared(uri: str, **options: object) -> tuple[StoreStats, str]:
    """Return the statistics of a `shared://` file and its damage; change nothing.

    The damage is usually an empty text. Raises ConfigError, or StoreUnavailable if the file cannot
    be read, or if `open_store` would reject it.
    """
    path, read = _shared_file(uri, options)
    from ratekeeper.decide.stores.native import examine_file  # noqa: PLC0415 - as in _kernel_store

    return examine_file(path, read.capacity, read.log_bytes, read.mode)


def _shared_file(uri: str, given: Options) -> tuple[Path, LocalOptions]:
    """Return what a URI says. Raises ConfigError, and StoreUnavailable without the kernel."""
    parts = _split(uri)
    path = unquote(parts.path)
    if parts.netloc or not path.strip("/") or "\0" in path:
        raise ConfigError(
            f"store={uri!r} has no absolute path; with three slashes, for example "
            f'"shared:///run/api.limits"'
        )
    read = _options(SHARED_OPTIONS, uri, parts, given)
    if not kernel.BUILT:
        raise StoreUnavailable(
            f"store={uri!r} needs the C kernel, which {kernel.MISSING[0]}: {kernel.MISSING[1]}; "
            f"memory:// works without"
        )
    return Path(path), read


def _options(
    known: Mapping[str, Option], uri: str, parts: SplitResult, given: Options
) -> LocalOptions:
    """Return the options of the URI and of the call, which takes precedence."""
    try:
        merged = {**query_options(known, parts.query), **given}
        return LocalOptions(**read_options(known, merged))
    except ConfigError as error:
        raise ConfigError(f"store={uri!r}: {error}") from None


def _kernel_store(clock: Clock, path: Path | None, read: LocalOptions) -> Store:
    # Imported here, because the import fails if the kernel was not built.
    from ratekeeper.decide.stores.native import KernelStore  # noqa: PLC0415 - see above

    return KernelStore(
        clock,
        read.capacity,
        path=path,
        log_bytes=read.log_bytes,
        mode=read.mode,
        allowances_max=read.allowances,
    )


def _open_redis(uri: str, clock: Clock, given: Options) -> Store:
    config = parse_redis(uri, **given)
    try:
        # Imported here: its libraries are an extra that a service on one machine does not need.
        from ratekeeper.decide.stores.redis.store import RedisStore  # noqa: PLC0415 - see above
    except ImportError as error:
        raise ConfigError(
            f"store={config.shown()} needs the libraries of the redis extra ({error}); "
            f"install them with: pip install 'ratekeeper[redis]'"
        ) from error
    return RedisStore(config, clock)


_OPENERS: Final[dict[str, Callable[[str, Clock, Options], Store]]] = {
    "memory": _open_memory,
    "shared": _open_shared,
    **dict.fromkeys(REDIS_SCHEMES, _open_redis),
}
SCHEMES: Final = tuple(_OPENERS)
"""Every scheme that `open_store` accepts."""
