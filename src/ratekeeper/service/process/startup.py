"""The startup of a service: everything that can fail is tried once, before workers start.

The main process checks the settings, rules, store, tokens and ports, and reports any
error. Only then does it start workers (`main_process.py`). If a worker found the problem instead,
it would be restarted again and again, and the reason would only be in a log.
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

from ratekeeper.core.errors import ConfigError
from ratekeeper.fleet.datagrams import KeyFile
from ratekeeper.fleet.settings import split_address
from ratekeeper.service.http.tokens import Tokens
from ratekeeper.service.process import logs
from ratekeeper.service.process.settings import ServiceSettings, free_udp

_UMASK: Final = 0o077
# A worker accepts thousands of connections; many systems allow a process 1,024 open files by
# default.
OPEN_FILES: Final = 65_536

log = logging.getLogger("ratekeeper.service")


def run(settings: ServiceSettings) -> None:
    """Run the service until a signal ends it. Raises ConfigError, StoreError if it cannot start."""
    logging.config.dictConfig(logs.configuration(settings.log_format, settings.node_name))
    settings = check_access(settings)
    check_tls(settings)
    check_gossip_key(settings)
    allow_open_files()
    with private_files(), run_folder(settings) as counters, ports(settings) as listening:
        version, rules = asyncio.run(prepared(listening, counters))
        # Imported here: `prepared` has just reported a missing extra.
        from ratekeeper.service.process.main_process import serve_until_signal  # noqa: PLC0415 - see above

        serve_until_signal(listening, counters, version, rules)
    log.info("the service has ended", extra=logs.event("ended"))


def check_access(settings: ServiceSettings) -> ServiceSettings:
    """Raise ConfigError if other machines could use the service without a token.

    If there are tokens now, the returned settings contain their path: if the file disappears, a
    worker that starts later must not conclude that no token is needed.
    """
    path = settings.tokens_path
    if settings.tokens and not path.exists():
        raise ConfigError(
            f"--tokens {path} does not exist; create it with: "
            f"ratekeeper token create NAME --role check --tokens {path}"
        )
    tokens = Tokens.load(path)
    if not tokens.required and not settings.is_local and not settings.insecure_no_tokens:
        raise ConfigError(
            f"{settings.far_host} can be reached from other machines, and there is no token: any "
            f"client could spend any quota. Create a token with `ratekeeper token create NAME "
            f"--role check --tokens {path}`, or listen on 127.0.0.1, or give --insecure-no-tokens"
        )
    return replace(settings, tokens=str(path)) if tokens.required else settings


def check_tls(settings: ServiceSettings) -> None:
    """Raise ConfigError if the certificate, its key or the authority of clients is unusable."""
    for name, file in (
        ("--tls-cert", settings.tls_cert),
        ("--tls-key", settings.tls_key),
        ("--grpc-client-ca", settings.grpc_client_ca),
    ):
        if file and not (os.access(file, os.R_OK) and Path(file).is_file()):
            raise ConfigError(f"{name} {file} cannot be read")
    if not settings.tls_cert:
        return
    try:
        # A key with a pass phrase is rejected: at a restart, no operator is there to type it.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key, password=lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} are not a "
            f"certificate and its key, both in PEM and the key without a pass phrase ({error})"
        ) from None
    if settings.grpc_client_ca:
        try:
            ssl.create_default_context(cafile=settings.grpc_client_ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--grpc-client-ca {settings.grpc_client_ca} has no certificate in PEM ({error})"
            ) from None


def check_gossip_key(settings: ServiceSettings) -> None:
    """Raise ConfigError if the keys of gossip cannot be read, or other users can read them."""
    if settings.gossip_key:
        try:
            KeyFile(Path(settings.gossip_key))
        except ConfigError as error:
            raise ConfigError(f"--gossip-key {error}") from error


# ── Files, folders and ports ───────────────────────────────────────────────────────────────────


def allow_open_files() -> None:
    """Raise the limit of open files, up to 65,536 if the system allows it; workers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the limit stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def private_files() -> Iterator[None]:
    """Make files that are created inside the block readable for their owner only.

    Records contain client keys, and other users may be able to read the data folder. Workers
    inherit this.
    """
    before = os.umask(_UMASK)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def run_folder(settings: ServiceSettings) -> Iterator[Path]:
    """Create the data folder and, inside it, a folder for this run, which is removed at the end."""
    data = Path(settings.data)
    folder = data / f"run-{os.getpid()}"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in data.glob("run-*"):
            if _is_stale(other):
                shutil.rmtree(other, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"--data {data}: {error.strerror}; give a folder that this user can write to"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    """Return True if the process of that run no longer exists."""
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
def ports(settings: ServiceSettings) -> Iterator[ServiceSettings]:
    """Check that the ports are free; yield the settings with resolved addresses and ports.

    Port 0 selects a free port, which stays reserved until the end of the block.

    Workers share a port (SO_REUSEPORT). A second service of the same user could share it, too, and
    would receive half of the requests. So a port that is in use is rejected here.
    """
    held: list[socket.socket] = []
    try:
        at, port = _reserved("--port", settings.host, settings.port, held)
        grpc = settings.grpc
        if grpc:
            host, number = split_address("--grpc", grpc)
            _, number = _reserved("--grpc", host, number, held)
            grpc = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        gossip = free_udp(settings.gossip) if settings.gossip else ""
        yield replace(settings, host=at, port=port, grpc=grpc, gossip=gossip)
    finally:
        for each in held:
            each.close()


def _reserved(option: str, host: str, port: int, held: list[socket.socket]) -> tuple[str, int]:
    """Return the resolved address and the port. `held` keeps a port that was selected for 0."""
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
        # Bound, but not listening: this reserves the port and receives no connections.
        keeper.bind(address)
        found: int = keeper.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"{option} {host}:{port}: {error.strerror}; use an address of this machine and a "
            f"free port, for example {option} {'0' if option == '--port' else '127.0.0.1:0'}"
        ) from None
    return str(address[0]), found


async def prepared(settings: ServiceSettings, counters: Path | None = None) -> tuple[str, int]:
    """Try everything that a worker does at startup. Returns the rules' version and number."""
    try:
        from ratekeeper.service.process import identify, worker  # noqa: PLC0415 - needs the server extra

        # The URL only: a service can limit while the database of the records is unavailable.
        worker.check_record(settings)
    except ImportError as error:
        raise ConfigError(
            f"the service needs {error.name}, which is not installed; "
            f"install it with: pip install 'ratekeeper[server]'"
        ) from error

    identify.identity_of(settings)
    if settings.grpc:
        from ratekeeper.service.grpc import server  # noqa: PLC0415 - needs the server extra

        server.chosen(settings.grpc_server)
    if settings.database and settings.seed:
        await _seed(settings.database, settings.seed)
    try:
        limiter = await asyncio.to_thread(worker.open_limiter, settings, counters, follow=False)
    except ConfigError as error:
        if settings.database and not settings.seed and "no rules yet" in str(error):
            raise ConfigError(
                f"{error}, or start with: ratekeeper serve --seed limits.yaml, or with "
                f"--rules none if clients give limits with the call (POST /v1/limit)"
            ) from None
        raise
    rules = limiter.compiled_rules
    await limiter.close()
    return rules.version, len(rules.document.rules)


async def _seed(database: str, path: str) -> None:
    """Apply a document as the first version, unless the database has rules."""
    from ratekeeper.control.repository import Repository  # noqa: PLC0415 - the control extra
    from ratekeeper.core.errors import VersionConflict  # noqa: PLC0415 - same
    from ratekeeper.rules.document.reading import read_file  # noqa: PLC0415 - same

    document = read_file(Path(path))
    async with await Repository.open(database) as repository:
        if await repository.number():
            return
        with suppress(VersionConflict):  # another node was faster
            await repository.apply(
                document, author="ratekeeper serve", reason=f"seeded from {path}", expected=0
            )
