"""The settings of `ratekeeper serve`, with their defaults and checks.

A setting comes from the command line, else from its environment variable (`--node-id` is
RATEKEEPER_NODE_ID), else from the YAML file given with `--config`, else it has its default. It has
the same name in all of them. All settings are checked here, together, before anything starts.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_type_hints
from urllib.parse import quote

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.decide.failure import LocalFallback
from ratekeeper.fleet.settings import (
    FLEET_NAME,
    Fleet,
    check_socket_path,
    joined_address,
    split_address,
)
from ratekeeper.fleet.transport import own_address
from ratekeeper.regions.settings import Regions
from ratekeeper.rules.document.tree import suggestion
from ratekeeper.web.options import node_digest

LogFormat = Literal["auto", "json", "text"]
OnFailure = Literal["open", "closed", "local"]
Draft = Literal["10", "7", "6", "none"]
GrpcServerChoice = Literal["auto", "libnghttp2", "grpcio"]
RecordSubjects = Literal["plain", "hashed", "none"]
Forwarded = Literal["any", "x-forwarded-for", "forwarded", "x-real-ip"]

WORKERS_MAX: Final = 512
NODES_MAX: Final = 10_000
SECONDS_MAX: Final = 3_600.0
DAYS_MAX: Final = 3_650
ROWS_MAX: Final = 1_000_000_000
MEGABYTES_MAX: Final = 10_000_000
CONFIG_BYTES_MAX: Final = 1024 * 1024
_LISTED_MAX: Final = 100
# `--rules none`: the service decides only by limits that are given with the call.
NO_RULES: Final = "none"
# `--peers store`: nodes find each other through the store; `--peers dns:NAME:PORT`: by a name.
_STORE_PEERS: Final = "store"
_DNS_PEERS: Final = "dns:"
# Settings that are a mapping in a file, and NAME=VALUE elsewhere.
_TABLES: Final = ("regions", "region_shares")
_SHARE: Final = re.compile(r"[0-9]{1,5}/[1-9][0-9]{0,4}|[0-9]?\.[0-9]{1,17}|[0-9]")
_NODE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for this user's persistent state (XDG base directories)."""
    given = environ.get("XDG_STATE_HOME", "")
    # The XDG standard says to ignore a relative path.
    root = Path(given) if Path(given).is_absolute() else _at_home("~/.local/state")
    return root / "ratekeeper"


def _at_home(path: str) -> Path:
    """Expand `~`. Raises ConfigError if the user has no home directory, as in some containers."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path}: this user has no home directory; give a folder, for example "
            f"--data /var/lib/ratekeeper"
        ) from None


def _processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _log_format() -> LogFormat:
    return "text" if sys.stderr is not None and sys.stderr.isatty() else "json"


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The settings of a service. `complete` fills in defaults and makes paths absolute."""

    host: str = "127.0.0.1"
    port: int = 8080
    grpc: str = "127.0.0.1:8081"
    """HOST:PORT; empty: no gRPC."""
    workers: int = 0
    """0: one per processor."""
    rules: str = ""
    """A file or the URL of a database; empty: a database in the data folder; "none": no rules."""
    seed: str = ""
    """A rule document for a database that has no rules yet."""
    data: str = ""
    """The folder for the store, the rules and the tokens; empty: `state_folder()`."""
    store: str = ""
    """A store URI; empty: a file in the data folder that all workers share."""
    region: str = ""
    """The region that this machine is in, one of `regions`; empty: there are no regions."""
    regions: tuple[str, ...] = ()
    """NAME=URI of each region's Redis; in the file also a mapping. They share global rules."""
    region_shares: tuple[str, ...] = ()
    """NAME=SHARE of each region, for rules that are exact; empty: equal shares."""
    on_failure: OnFailure = "open"
    nodes: int = 1
    """The least number of machines that share the store. Gossip may find more."""
    gossip: str = ""
    """HOST:PORT, with an IP address as HOST, for hints of other nodes; empty: no gossip."""
    gossip_advertise: str = ""
    """HOST:PORT at which other nodes reach this one, if it differs from `gossip`."""
    gossip_key: str = ""
    """The file with the keys that authenticate gossip; empty: only on a loopback address."""
    peers: tuple[str, ...] = ()
    """HOST:PORT of other nodes, or `dns:NAME:PORT`; empty or `store`: all nodes on this store."""
    fleet_name: str = FLEET_NAME
    """A node ignores gossip from fleets with another name."""
    dead_seconds: float = 15.0
    """How long after its last heartbeat a node is dead."""
    lease_seconds: float = 1.0
    flush_seconds: float = 0.2
    warm: float = 0.5
    """The share of a limit from which each check of an `eventual` rule asks the store."""
    allowances: int = 100_000
    """How many subjects this machine can answer itself at a time."""
    ceiling: str = ""
    """The most that this machine allows while the store is unavailable; empty: no bound."""
    emergency: str = ""
    """The most per client address, after `emergency_after` seconds without the store."""
    emergency_after: float = 60.0
    tokens: str = ""
    """Empty: tokens.json in the data folder, if it exists."""
    insecure_no_tokens: bool = False
    trusted_proxy: tuple[str, ...] = ()
    forwarded: Forwarded = "any"
    """The header in which trusted proxies name the client; the others are then ignored."""
    identify: tuple[str, ...] = ()
    """FIELD=SOURCE; a field that is given twice has two sources, tried in that order."""
    jwt_key: str = ""
    """A file with a public key or a shared secret, for sources `claim:NAME`."""
    jwks: str = ""
    """A file or a URL with several keys, instead of `jwt_key`."""
    jwt_algorithm: tuple[str, ...] = ()
    jwt_issuer: tuple[str, ...] = ()
    """The issuers whose tokens are accepted; empty: any."""
    jwt_audience: tuple[str, ...] = ()
    """The audiences of which a token must name one; empty: any."""
    jwt_leeway: float = 0.0
    tls_cert: str = ""
    tls_key: str = ""
    grpc_server: GrpcServerChoice = "auto"
    """The gRPC server; "auto": the one on libnghttp2 if it was built, otherwise grpcio."""
    grpc_client_ca: str = ""
    """The authority whose certificates clients of gRPC need; empty: they need none."""
    node_id: str = ""
    """The name of this node for clients and operators; empty: see `node_name`, `node_header`."""
    draft: Draft = "10"
    legacy_headers: bool = True
    record: str = ""
    """The database for decisions and usage; empty: one in the data folder; "off": none."""
    sample: float = 0.01
    """The share of allowed decisions that is recorded. Every denial is recorded."""
    record_subjects: RecordSubjects = "plain"
    keep_decisions: int = 7
    """Days."""
    keep_usage: int = 90
    """Days."""
    keep_rows: int = 500_000
    """The most rows of decisions, and of usage."""
    keep_megabytes: int = 512
    """The most space that the records take, in millions of bytes."""
    log_format: LogFormat = "auto"
    """`auto`: text for a terminal, JSON for everything else."""
    access_log: bool = False
    console_link: bool = False
    """Print a one-time login link of the console at startup; only with the log format text."""
    drain_seconds: float = 1.0
    """From SIGTERM until the service accepts no more connections."""
    shutdown_seconds: float = 30.0
    """How long requests in progress may take after that."""

    @classmethod
    def gather(cls, given: Mapping[str, Any], config: str | None = None) -> Self:
        """Merge given values over those of the file over the defaults; complete and check them.

        In `given`, None or an empty list means that a setting was not given. Raises ConfigError.
        """
        found = {} if config is None else _read(Path(config))
        found |= {name: value for name, value in given.items() if value not in (None, [], ())}
        settings = cls(**{name: _checked(name, value) for name, value in found.items()})
        return settings.complete()

    def complete(self) -> Self:
        """Return the settings with the defaults that depend on the machine, checked."""
        data = _at_home(self.data).absolute() if self.data else state_folder()
        table = self.region_table
        if table is not None and self.store not in ("", table.store):
            raise ConfigError(
                f"--store has no effect with --region {self.region}: the store is that of the "
                f"region in --regions; remove --store"
            )
        settings = replace(
            self,
            # IPv6 addresses may have brackets, as in a URL and in --grpc.
            host=self.host.removeprefix("[").removesuffix("]"),
            data=str(data),
            workers=self.workers or _processors(),
            rules=self.rules or f"sqlite:///{quote(str(data / 'rules.db'))}",
            store=table.store if table else self.store or f"shared://{quote(str(data / 'limits'))}",
            log_format=_log_format() if self.log_format == "auto" else self.log_format,
            record=self.record or f"sqlite:///{quote(str(data / 'records.db'))}",
            peers=tuple(each.strip() for text in self.peers for each in text.split(",") if each),
        )
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ConfigError for a value or a combination that is not possible."""
        _within("port", self.port, 0, 65_535)
        _within("workers", self.workers, 1, WORKERS_MAX)
        _within("nodes", self.nodes, 1, NODES_MAX)
        _within("sample", self.sample, 0, 1)
        _within("keep-decisions", self.keep_decisions, 1, DAYS_MAX)
        _within("keep-usage", self.keep_usage, 1, DAYS_MAX)
        _within("keep-rows", self.keep_rows, 10_000, ROWS_MAX)
        _within("keep-megabytes", self.keep_megabytes, 64, MEGABYTES_MAX)
        _within("drain-seconds", self.drain_seconds, 0, SECONDS_MAX)
        _within("shutdown-seconds", self.shutdown_seconds, 1, SECONDS_MAX)
        _within("jwt-leeway", self.jwt_leeway, 0, SECONDS_MAX)
        try:
            _ = self.local_fallback
        except ConfigError as error:
            raise ConfigError(f"--ceiling, --emergency or --emergency-after: {error}") from error
        if self.grpc:
            split_address("--grpc", self.grpc)
        self._check_fleet()
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key belong together; give both or neither")
        if self.grpc_client_ca and not (self.tls_cert and self.grpc):
            raise ConfigError(
                "--grpc-client-ca is for gRPC with TLS; give --tls-cert, --tls-key and --grpc, too"
            )
        if self.node_id and not _NODE_ID.fullmatch(self.node_id):
            raise ConfigError(
                f"--node-id {show(self.node_id)} is not 1 to 64 letters, digits and . _ : -; "
                f"for example --node-id eu-1"
            )
        if self.seed and not self.database:
            raise ConfigError(
                f"--seed is for a database that has no rules yet, and --rules {show(self.rules)} "
                f"is a file; remove --seed, or use a database: --rules sqlite:///rules.db"
            )

    def _check_fleet(self) -> None:
        """Raise ConfigError for settings of a fleet that cannot work."""
        _within("lease-seconds", self.lease_seconds, 0.02, 2)
        _within("flush-seconds", self.flush_seconds, 0.01, 10)
        _within("warm", self.warm, 0, 1)
        _within("dead-seconds", self.dead_seconds, 1, 60)
        _within("allowances", self.allowances, 1_000, 10_000_000)
        if not self.gossip:
            given = {
                "--peers": self.peers,
                "--gossip-key": self.gossip_key,
                "--gossip-advertise": self.gossip_advertise,
                "--fleet-name": self.fleet_name != FLEET_NAME,
            }
            option = next((option for option, value in given.items() if value), "")
            if option:
                raise ConfigError(
                    f"{option} has no effect without --gossip; for example --gossip 10.0.0.5:7946"
                )
            return
        host, _ = split_address("--gossip", self.gossip)
        if self.is_store_here:
            raise ConfigError(
                f"--gossip is for machines that share a store, and --store {self.store} is on this "
                f"machine; use --store redis://host, or remove --gossip"
            )
        own_address(self.gossip, "--gossip")
        check_socket_path(self._fleet_table, "--data")
        if self.gossip_advertise:
            own_address(self.gossip_advertise, "--gossip-advertise")
        if not is_loopback(host) and not self.gossip_key:
            raise ConfigError(
                f"--gossip {self.gossip} can be reached from other machines, and there is no "
                f"--gossip-key: any of them could have clients denied. Make a key with "
                f"`(umask 077; openssl rand -hex 32 > gossip.key)`, or use --gossip 127.0.0.1:7946"
            )
        if len(self.peers) > 1 and _STORE_PEERS in self.peers:
            raise ConfigError("--peers store finds all nodes; give it alone")
        for peer in self.peer_addresses:
            split_address("--peers", peer)

    def without_gossip(self) -> Self:
        """Return the settings for a process that takes no part in gossip."""
        return replace(
            self, gossip="", gossip_key="", gossip_advertise="", fleet_name=FLEET_NAME, peers=()
        )

    @property
    def node_name(self) -> str:
        """The name of this node in logs, records and the console: by default the host name."""
        host = re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname())[:64]
        return self.node_id or host or "node"

    @property
    def node_header(self) -> str:
        """The name of this node in replies: by default a digest, which hides the host name."""
        return self.node_id or node_digest()

    @property
    def is_store_here(self) -> bool:
        """Whether the store is on this machine, so that it cannot be unavailable."""
        return self.store.startswith(("memory://", "shared://"))

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """The addresses of other nodes; empty if nodes find each other through the store."""
        if self.peers == (_STORE_PEERS,):
            return ()
        return tuple(peer.removeprefix(_DNS_PEERS) for peer in self.peers)

    @property
    def _fleet_table(self) -> Path:
        return Path(self.data) / "fleet"

    @property
    def fleet(self) -> Fleet | None:
        """How this node answers checks itself; None if no other machine shares the store.

        All workers of the machine are one node: they spend from the same table.
        """
        if self.is_store_here:
            return None
        path = quote(str(self._fleet_table))
        return Fleet(
            # No limit counts in this file, only its allowances are used.
            store=f"shared://{path}?capacity=1000&allowances={self.allowances}",
            lease_seconds=self.lease_seconds,
            flush_seconds=self.flush_seconds,
            warm=self.warm,
            nodes=self.nodes,
            gossip=self.gossip or None,
            key_file=self.gossip_key or None,
            peers=self.peer_addresses,
            dead_seconds=self.dead_seconds,
            advertise=self.gossip_advertise or None,
            name=self.fleet_name,
        )

    @property
    def region_table(self) -> Regions | None:
        """The regions that share global rules; None if there are none. Raises ConfigError."""
        if not self.region:
            given = "--regions" if self.regions else "--region-shares" if self.region_shares else ""
            if given:
                raise ConfigError(
                    f"{given} has no effect without --region, the name of the region that this "
                    f"machine is in; for example --region eu"
                )
            return None
        stores = _named("--regions", self.regions, "eu=redis://eu.internal")
        if not stores:
            raise ConfigError(
                f"--region {show(self.region)} needs the table of all regions and their stores; "
                f"for example --regions {self.region}=redis://localhost, or in the file of "
                f"--config: regions: {{{self.region}: redis://localhost, …}}"
            )
        shares = {
            name: _share(name, text)
            for name, text in _named("--region-shares", self.region_shares, "eu=0.4").items()
        }
        try:
            return Regions(self.region, stores, shares or None)
        except ConfigError as error:
            raise ConfigError(f"--region, --regions or --region-shares: {error}") from None

    @property
    def database(self) -> str | None:
        """The URL of the rules database; None if the rules come from a file."""
        return self.rules if "://" in self.rules else None

    @property
    def local_fallback(self) -> LocalFallback:
        """How this machine limits while the store is unavailable; its workers count together.

        A store on this machine cannot be unavailable, so it needs no second file.
        """
        return LocalFallback(
            nodes=self.nodes,
            store="memory://"
            if self.is_store_here
            else f"shared://{quote(str(Path(self.data) / 'local_fallback'))}",
            ceiling=self.ceiling or None,
            emergency=self.emergency or None,
            emergency_after=self.emergency_after,
        )

    @property
    def tokens_path(self) -> Path:
        """The path of the token file, which may not exist."""
        return Path(self.tokens) if self.tokens else Path(self.data) / "tokens.json"

    @property
    def far_host(self) -> str | None:
        """The first address that other machines can reach; None if there is none."""
        hosts = [self.host, *([split_address("--grpc", self.grpc)[0]] if self.grpc else [])]
        return next((host for host in hosts if not is_loopback(host)), None)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the service."""
        return self.far_host is None

    @property
    def sources(self) -> dict[str, list[Any]]:
        """`identify` by field: the sources of each, in the order in which they are tried."""
        found: dict[str, list[Any]] = {}
        for each in self.identify:
            field, equals, source = each.partition("=")
            if not (field and equals and source):
                raise ConfigError(
                    f"--identify {show(each)} is not FIELD=SOURCE; "
                    f"for example --identify api_key=header:X-API-Key"
                )
            found.setdefault(field, []).append(source)
        return found


def _named(option: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Return the values of NAME=VALUE by name. An error shows no value: it may be a password."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            shown = show(name) if equals else "a value without ="
            raise ConfigError(
                f"{option}: {shown} is not NAME=VALUE; for example {option} {example}"
            )
        if name in found:
            raise ConfigError(f"{option}: the region {show(name)} occurs twice; remove one")
        found[name] = value
    return found


def _share(region: str, text: str) -> Fraction:
    """Return a share that was written as 0.4 or 2/5."""
    if not _SHARE.fullmatch(text):
        raise ConfigError(
            f"--region-shares: the share of {show(region)} is {show(text)}, and not a number such "
            f"as 0.4 or 2/5"
        )
    return Fraction(text)


def free_udp(gossip: str) -> str:
    """Return the address of --gossip, with a free port instead of port 0. Raises ConfigError."""
    host, port = own_address(gossip, "--gossip")
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            found: int = probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"--gossip {gossip}: {error.strerror}; use an address of this machine and a free port"
        ) from None
    return joined_address(host, found)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a service on this host."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{name} {value:g} is not between {low:g} and {high:g}")


# ── From a file ────────────────────────────────────────────────────────────────────────────────

_TYPES: Final = get_type_hints(ServiceSettings)
NAMES: Final = tuple(each.name for each in fields(ServiceSettings))


def _read(path: Path) -> dict[str, Any]:
    """Read the settings in a YAML file. Raises ConfigError."""
    import yaml  # noqa: PLC0415 - an extra, not needed without a file

    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
        data = yaml.safe_load(text) if len(text) <= CONFIG_BYTES_MAX else None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if data is None and not text.strip():
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path} is not a mapping of settings; for example: port: 8080")
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in NAMES:
            known = [each.replace("_", "-") for each in NAMES]
            hint = suggestion(name.replace("_", "-"), known)
            raise ConfigError(f"--config {path}: unknown field {show(key)}; {hint}")
        if name in found:
            raise ConfigError(f"--config {path}: {show(key)} occurs twice")
        found[name] = value
    return found


def _checked(name: str, value: Any) -> Any:
    """Return the value as the type of the setting; lists become tuples. Raises ConfigError."""
    wanted = _TYPES[name]
    shown = f"{name.replace('_', '-')}: {show(value)}"
    if get_args(wanted) and wanted != tuple[str, ...]:
        choices = get_args(wanted)
        text = str(value).lower() if value is not None else "none"
        if text not in choices:
            raise ConfigError(f"{shown} is not one of {', '.join(choices)}")
        return text
    if wanted == tuple[str, ...]:
        if name in _TABLES and isinstance(value, dict):  # a mapping in the file
            value = [f"{key}={each}" for key, each in value.items()]
        listed = [value] if isinstance(value, str) else value
        texts = isinstance(listed, list | tuple) and all(isinstance(each, str) for each in listed)
        if not texts or len(listed) > _LISTED_MAX:
            # A table may have passwords.
            what = name.replace("_", "-") if name in _TABLES else shown
            raise ConfigError(f"{what} is not a list of at most {_LISTED_MAX} strings")
        return tuple(listed)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if name == "grpc" and value is False:  # `grpc: no` in YAML
        return ""
    if name == "record" and value is False:  # `record: off` in YAML
        return "off"
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{shown} is not {_KINDS[wanted]}")
    return value


_KINDS: Final = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
