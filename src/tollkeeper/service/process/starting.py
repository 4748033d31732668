"""From settings to a service that runs: all that can fail is tried first, and once.

The main process reads the settings, tries the rules, the store, the tokens and the ports, says what
is wrong with them, and only then starts workers (`server.py`). A worker that failed at any of it
would be started again and again, and say so in a log.
"""

from __future__ import annotations

import asyncio
import logging
import logging.config
import os
import resource
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tollkeeper.core.errors import ConfigError
from tollkeeper.service.http.tokens import Tokens
from tollkeeper.service.process import logs
from tollkeeper.service.process.settings import Settings, address_of

_OTHERS_NOTHING: Final = 0o077
# A worker has a thousand connections of its own accord; many systems allow that many files in all.
OPEN_FILES: Final = 65_536

log = logging.getLogger("tollkeeper.service")


def run(settings: Settings) -> None:
    """Serve until told to end. Raises ConfigError or StoreError for what cannot be started."""
    logging.config.dictConfig(logs.configuration(settings.log_format, settings.node_id))
    settings = check_access(settings)
    check_tls(settings)
    allow_open_files()
    with private_files(), run_folder(settings) as counters, ports(settings) as listening:
        version = asyncio.run(prepared(listening, counters))
        # Imported here: that the extra is there was seen just before.
        from tollkeeper.service.process.server import serve_until_told  # noqa: PLC0415 - see above

        serve_until_told(listening, counters, version)
    log.info("ended", extra=logs.event("ended"))


def check_access(settings: Settings) -> Settings:
    """Who could reach the service without a token? Raises ConfigError if that is everybody.

    Tokens that are there now are named in the settings that it gives: a worker that starts later,
    and finds them gone, must not take that for none being wanted.
    """
    path = settings.tokens_path
    if settings.tokens and not path.exists():
        raise ConfigError(
            f"--tokens {path} does not exist; make it with: "
            f"tollkeeper token create NAME --role check --tokens {path}"
        )
    tokens = Tokens.load(path)
    if not tokens.demanded and not settings.is_local and not settings.insecure_no_tokens:
        raise ConfigError(
            f"{settings.far_host} can be reached from other machines, and whoever reaches it could "
            f"spend everybody's quota: make a token with `tollkeeper token create NAME --role "
            f"check --tokens {path}`, or stay on 127.0.0.1, or say --insecure-no-tokens"
        )
    return replace(settings, tokens=str(path)) if tokens.demanded else settings


def check_tls(settings: Settings) -> None:
    """Can the certificate and its key be used? Raises ConfigError."""
    for name, file in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
        if file and not (os.access(file, os.R_OK) and Path(file).is_file()):
            raise ConfigError(f"{name} {file} cannot be read")
    if not settings.tls_cert:
        return
    try:
        # What asks for a pass phrase gets none: nobody is there to type it when it starts again.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key, password=lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} are not a "
            f"certificate and its key, both in PEM and the key without a pass phrase ({error})"
        ) from None


# ── What a run needs ───────────────────────────────────────────────────────────────────────────


def allow_open_files() -> None:
    """As many as the system lets us have, up to a bound; workers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # then it is as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def private_files() -> Iterator[None]:
    """What is made inside, by this process and its workers, is for its user alone.

    Records have the keys of clients in them, and the data folder may be one that others can read.
    """
    before = os.umask(_OTHERS_NOTHING)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def run_folder(settings: Settings) -> Iterator[Path]:
    """The data folder, and in it one for this run alone, which is removed at the end."""
    data = Path(settings.data)
    folder = data / f"run-{os.getpid()}"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in data.glob("run-*"):
            if _is_left_over(left):
                shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"--data {data}: {error.strerror}; name a folder that can be written"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_left_over(folder: Path) -> bool:
    number = folder.name.removeprefix("run-")
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def ports(settings: Settings) -> Iterator[Settings]:
    """The settings with what is listened on: the address that a name stands for, and the ports.

    Port 0 is any, and is kept from others.

    Workers share a port (SO_REUSEPORT), and so would another service of the same user, and take
    half of the requests: therefore a port that somebody has is refused here.
    """
    held: list[socket.socket] = []
    try:
        at, port = _reserved("--port", settings.host, settings.port, held)
        grpc = settings.grpc
        if grpc:
            host, number = address_of(grpc)
            _, number = _reserved("--grpc", host, number, held)
            grpc = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        yield replace(settings, host=at, port=port, grpc=grpc)
    finally:
        for each in held:
            each.close()


def _reserved(option: str, host: str, port: int, held: list[socket.socket]) -> tuple[str, int]:
    """The address, and the port, which nobody has; one that was 0 is held until the end."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        if port:
            return str(address[0]), port
        keeper = socket.socket(family, kind, protocol)
        held.append(keeper)
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Bound and never listening: nobody else gets the port, and no connection gets here.
        keeper.bind(address)
        found: int = keeper.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"{option} {host}:{port}: {error.strerror}; choose an address of this machine and a "
            f"free port, for example {option} {'0' if option == '--port' else '127.0.0.1:0'}"
        ) from None
    return str(address[0]), found


async def prepared(settings: Settings, counters: Path | None = None) -> str:
    """The version of the rules. Everything that a worker would fail at fails here, once."""
    try:
        from tollkeeper.service.process import wiring  # noqa: PLC0415 - an extra's
    except ImportError as error:
        raise ConfigError(
            f"the service needs {error.name}, which is not installed; "
            f"install it with: pip install 'tollkeeper[server]'"
        ) from error

    wiring.identity_of(settings)
    # Only whether it can be one: a database that is away now is no reason not to limit.
    wiring.check_record(settings)
    if settings.database and settings.seed:
        await _seed(settings.database, settings.seed)
    try:
        limiter = await asyncio.to_thread(wiring.open_limiter, settings, counters, follow=False)
    except ConfigError as error:
        if settings.database and not settings.seed and "no rules yet" in str(error):
            raise ConfigError(
                f"{error}, or start with: tollkeeper serve --seed limits.yaml"
            ) from None
        raise
    version = limiter.rules_status().version
    await limiter.close()
    return version


async def _seed(database: str, path: str) -> None:
    """Put a document in force as the first version, if there is none."""
    from tollkeeper.control.repository import Repository  # noqa: PLC0415 - the control extra
    from tollkeeper.core.errors import VersionConflict  # noqa: PLC0415 - with it
    from tollkeeper.rules.document.reading import read_file  # noqa: PLC0415 - same

    document = read_file(Path(path))
    async with await Repository.open(database) as repository:
        if await repository.number():
            return
        with suppress(VersionConflict):  # another node was quicker
            await repository.apply(
                document, author="tollkeeper serve", reason=f"seeded from {path}", expected=0
            )
