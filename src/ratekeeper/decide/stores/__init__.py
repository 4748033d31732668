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

`capacity` is in states: one limit's count of one subject. `log_bytes` is the room for sliding
window logs. Both count when the store is made; a file keeps what it was made with. `allowances` is
the number of subjects that a node decides itself at a time; 100,000 by default. For `shared://`
they are in a second file, `/run/api.limits.allowances`, made on first use. `mode` is the mode of a
new file. A file that another user owns, or that the group or every user can write, is
rejected unless `mode` allows it. What a Redis URI can say is in `redis/config.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.errors import ConfigError, StoreUnavailable, show
from ratekeeper.decide import kernel
from ratekeeper.decide.allowances import ALLOWANCES_MAX_DEFAULT
from ratekeeper.decide.store import LocalStore, Store, StoreStats
from ratekeeper.decide.stores.memory import STATES_MAX_DEFAULT, PythonMemoryStore
from ratekeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from ratekeeper.decide.stores.redis.config import parse as parse_redis
from ratekeeper.decide.stores.workers import warn_of_several_workers

CAPACITY_MAX: Final = 1_000_000_000
Options = dict[str, object]
# Longer numbers are rejected without parsing: int() of a million digits takes seconds.
_DIGITS_MAX: Final = 12
_MODES: Final = {"600": 0o600, "660": 0o660, "666": 0o666}


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
    texts = _texts(uri, parts, given, ("capacity", "log_bytes", "allowances"))
    capacity = _number(uri, texts, "capacity") or STATES_MAX_DEFAULT
    log_bytes = _number(uri, texts, "log_bytes")
    allowances = _number(uri, texts, "allowances")
    if not kernel.BUILT:
        store = PythonMemoryStore(clock, capacity, allowances or ALLOWANCES_MAX_DEFAULT)
        return switches.forgetting(store)
    return switches.forgetting(_kernel_store(clock, None, capacity, log_bytes, allowances))


class SharedFile(NamedTuple):
    """The file that a URI names, and its options; 0 where none is given."""

    path: Path
    capacity: int
    log_bytes: int
    allowances: int
    mode: int


def _open_shared(uri: str, clock: Clock, given: Options) -> Store:
    return _kernel_store(clock, *_shared_file(uri, given))


def examine_shared(uri: str, **options: object) -> tuple[StoreStats, str]:
    """Return the statistics of a `shared://` file and its damage; change nothing.

    The damage is usually an empty text. Raises ConfigError, or StoreUnavailable if the file cannot
    be read, or if `open_store` would reject it.
    """
    file = _shared_file(uri, options)
    from ratekeeper.decide.stores.native import examine_file  # noqa: PLC0415 - as in _kernel_store

    return examine_file(file.path, file.capacity, file.log_bytes, file.mode)


def _shared_file(uri: str, given: Options) -> SharedFile:
    """Return what a URI says. Raises ConfigError, and StoreUnavailable without the kernel."""
    parts = _split(uri)
    path = unquote(parts.path)
    if parts.netloc or not path.strip("/") or "\0" in path:
        raise ConfigError(
            f"store={uri!r} has no absolute path; with three slashes, for example "
            f'"shared:///run/api.limits"'
        )
    texts = _texts(uri, parts, given, ("capacity", "log_bytes", "allowances", "mode"))
    capacity, log_bytes = _number(uri, texts, "capacity"), _number(uri, texts, "log_bytes")
    allowances = _number(uri, texts, "allowances")
    mode = _mode(uri, texts)
    if not kernel.BUILT:
        raise StoreUnavailable(
            f"store={uri!r} needs the C kernel, which {kernel.MISSING[0]}: {kernel.MISSING[1]}; "
            f"memory:// works without"
        )
    return SharedFile(Path(path), capacity, log_bytes, allowances, mode)


def _kernel_store(
    clock: Clock,
    path: Path | None,
    capacity: int,
    log_bytes: int,
    allowances: int,
    mode: int = 0o600,
) -> Store:
    # Imported here, because the import fails if the kernel was not built.
    from ratekeeper.decide.stores.native import KernelStore  # noqa: PLC0415 - see above

    return KernelStore(
        clock, capacity, path=path, log_bytes=log_bytes, mode=mode, allowances_max=allowances
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


def _texts(uri: str, parts: SplitResult, given: Options, known: tuple[str, ...]) -> dict[str, str]:
    """Return the options of the URI and of the call as texts."""
    texts = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in given.items():
        texts[name] = value if isinstance(value, str) else show(value)
    for name in texts:
        if name not in known:
            raise ConfigError(f"store={uri!r} has no option {name!r}; there are {', '.join(known)}")
    return texts


def _number(uri: str, texts: dict[str, str], name: str) -> int:
    """Return an option that is a whole number from 1 up; 0 if it is not given."""
    if name not in texts:
        return 0
    digits = texts[name].replace("_", "")
    plain = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX
    if not plain or not 1 <= int(digits) <= CAPACITY_MAX:
        raise ConfigError(
            f"store={uri!r}: {name}={texts[name]!r} is not a whole number from 1 to "
            f"{CAPACITY_MAX:,}; for example {name}=50000"
        )
    return int(digits)


def _mode(uri: str, texts: dict[str, str]) -> int:
    text = texts.get("mode", "600")
    if text not in _MODES:
        raise ConfigError(
            f"store={uri!r}: mode={text!r} is not one of {', '.join(_MODES)}: only this user, also "
            f"the file's group, or every user may read and write the counts"
        )
    return _MODES[text]


_OPENERS: Final[dict[str, Callable[[str, Clock, Options], Store]]] = {
    "memory": _open_memory,
    "shared": _open_shared,
    **dict.fromkeys(REDIS_SCHEMES, _open_redis),
}
SCHEMES: Final = tuple(_OPENERS)
"""Every scheme that `open_store` accepts."""
