"""`ratekeeper blocklist`: addresses that are denied again and again, as a file for a gateway.

The command asks a service for addresses that were denied many times in a row and writes them into a
file that nginx or nftables loads. A file is replaced by a rename, so a reader always sees a whole
one. Each entry has an end, which is written beside it, so the command continues after a restart of
the service or of itself. An entry that has become exempt (by the allow list, or as a proxy) goes.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from time import sleep, time
from typing import Annotated, Any, Final

import typer

from ratekeeper.cli.common import parse_duration_s, print_text, with_options
from ratekeeper.cli.service_client import (
    ServiceClient,
    ServiceError,
    json_objects,
    one_line,
    service_client,
)
from ratekeeper.core.errors import ConfigError

Network = IPv4Network | IPv6Network
# When each entry ends, in Unix time.
Ends = dict[Network, float]

ENTRIES_MAX: Final = 100_000
INTERVAL_S_MIN: Final = 1.0
RELOAD_SECONDS_MAX: Final = 60.0
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_PATH: Final = "/v1/admin/rejected"
_HEADING: Final = "# Written by `ratekeeper blocklist`, which replaces this file."
_ENTRY: Final = re.compile(r"\s*(?:deny )?([0-9a-fA-F:.]+(?:/\d+)?)[;,]? +# until (\S+)")


@with_options(service=service_client)
def blocklist(
    service: ServiceClient,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="nginx|nft|plain",
            help="nginx: `deny` lines to include; nft: a table for `nft -f`; plain: one per line.",
        ),
    ] = "plain",
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The file to replace; -: print it.")
    ] = "-",
    at_least: Annotated[
        int, typer.Option("--at-least", metavar="N", help="Denials in a row.")
    ] = 1_000,
    expire: Annotated[
        str,
        typer.Option(
            "--expire", metavar="DURATION", help="How long after its last denial an entry stays."
        ),
    ] = "1h",
    entries: Annotated[
        int, typer.Option("--max", metavar="N", help="The most entries; the longest stay.")
    ] = 10_000,
    follow: Annotated[bool, typer.Option("--follow", help="Keep the file up to date.")] = False,
    interval: Annotated[
        str, typer.Option("--interval", metavar="DURATION", help="How often, with --follow.")
    ] = "10s",
    reload: Annotated[
        str | None,
        typer.Option("--reload", metavar="COMMAND", help="Run after each change, without a shell."),
    ] = None,
) -> None:
    """Write the addresses that a service denied many times in a row as a block list.

    It needs a token with the role read or admin. It never lists an address of the allow list or of
    a trusted proxy. IPv6 clients are listed by /64.

    Exit code: 0 written; 2 the call, the file or the reload failed.

    Example: ratekeeper blocklist --format nginx --output /etc/nginx/blocked.conf --follow
    --reload "nginx -s reload"

    Example: ratekeeper blocklist --format nft --output /etc/nftables.d/blocked.nft --follow
    --reload "nft -f /etc/nftables.d/blocked.nft"
    """
    _check_options(file_format, entries, output == "-" and bool(follow or reload))
    expire_s = parse_duration_s("--expire", expire)
    interval_s = parse_duration_s("--interval", interval)
    if interval_s < INTERVAL_S_MIN:
        raise ConfigError(f"--interval {interval} is shorter than {INTERVAL_S_MIN:g} s; try 10s")
    path = None if output == "-" else Path(output)
    command = None if reload is None else shlex.split(reload)
    known = {} if path is None else read_ends(path)
    failed = False
    with service:
        while True:
            answer = _rejected(service, at_least, follow)
            known = merged(known, answer, time(), expire_s, entries)
            try:
                update(path, _WRITERS[file_format](known), command, again=failed)
                failed = False
            except (ConfigError, OSError) as error:
                _raise_unless(follow, error)
                failed = True
            if not follow:
                return
            sleep(interval_s)


def _raise_unless(follow: bool, error: Exception) -> None:
    """Print an error if the command goes on; raise it if not."""
    if not follow:
        raise error
    print_text(f"ratekeeper: {error}", to_stderr=True)


def _check_options(file_format: str, entries: int, needs_file: bool) -> None:
    if file_format not in _WRITERS:
        raise ConfigError(f"--format {one_line(file_format)} is not nginx, nft or plain")
    if not 1 <= entries <= ENTRIES_MAX:
        raise ConfigError(f"--max {entries} is not between 1 and {ENTRIES_MAX:,}")
    if needs_file:
        raise ConfigError("--follow and --reload need a file; for example --output blocked.conf")


def _rejected(service: ServiceClient, at_least: int, follow: bool) -> dict[str, Any]:
    """Return the answer of the service; an empty one if it fails and the command goes on.

    Then the known entries still end in time.
    """
    query = {"at_least": str(at_least)}
    try:
        return service.call("GET", _PATH, query=query, expected="exempt_omitted")
    except (ServiceError, ConfigError) as error:
        _raise_unless(follow, error)
        return {}


def merged(
    known: Mapping[Network, float],
    answer: Mapping[str, Any],
    now_s: float,
    expire_s: float,
    entries_max: int,
) -> Ends:
    """Return the entries of the block list: the known ones and those of the service.

    An entry ends `expire_s` after its last denial. If the service cannot name all networks that are
    exempt, only the entries that it names now are kept.
    """
    ends: Ends = {}
    if not answer.get("exempt_omitted"):
        exempt = [ip_network(each, strict=False) for each in answer.get("exempt", [])]
        ends = {
            network: end_s
            for network, end_s in known.items()
            if not any(
                each.version == network.version and each.overlaps(network) for each in exempt
            )
        }
    for item in json_objects(answer.get("items")):
        network = ip_network(item["network"])
        end_s = now_s - float(item["age_seconds"]) + expire_s
        ends[network] = max(end_s, ends.get(network, 0.0))
    lasting = [(network, end_s) for network, end_s in ends.items() if end_s > now_s]
    lasting.sort(key=lambda each: -each[1])
    return dict(lasting[:entries_max])


def read_ends(path: Path) -> Ends:
    """Return the entries of a file that this command has written; none if there is no file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(FILE_BYTES_MAX)
    except FileNotFoundError:
        return {}
    if text and _HEADING not in text:
        raise ConfigError(f"{path} was not written by this command; give another --output")
    ends: Ends = {}
    for line in text.splitlines():
        if found := _ENTRY.fullmatch(line):
            try:
                ends[ip_network(found[1])] = datetime.fromisoformat(found[2]).timestamp()
            except ValueError:
                continue  # edited by hand
    return ends


def update(path: Path | None, text: str, command: list[str] | None, *, again: bool = False) -> None:
    """Replace the file if its text has changed, and run the command then.

    Raises ConfigError if the command fails. `again`: run it in any case, because it failed before.
    """
    if path is None:
        print_text(text.rstrip("\n"))
        return
    try:
        if path.read_text(encoding="utf-8") == text and not again:
            return
    except FileNotFoundError:
        pass
    replace_file(path, text)
    if command:
        try:
            ran = subprocess.run(  # noqa: S603 - the operator's command, without a shell
                command, capture_output=True, timeout=RELOAD_SECONDS_MAX, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"--reload failed: {one_line(str(error))}") from None
        if ran.returncode:
            reason = one_line(ran.stderr.decode(errors="replace"))
            raise ConfigError(f"--reload ended with {ran.returncode}: {reason}")


def replace_file(path: Path, text: str) -> None:
    """Replace a file by a rename; it is readable by all, as the gateway may be another user."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _until(end_s: float) -> str:
    # Whole minutes: an entry that is denied every second must not change the file every second.
    minute = math.ceil(end_s / 60) * 60
    return f"# until {datetime.fromtimestamp(minute, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _shown(network: Network) -> str:
    single = network.prefixlen == network.max_prefixlen
    return str(network.network_address if single else network)


def _sorted(ends: Ends) -> list[tuple[Network, float]]:
    return sorted(ends.items(), key=lambda each: (each[0].version, each[0].network_address))


def nginx_text(ends: Ends) -> str:
    """Return `deny` lines for an `include` in a server or location of nginx."""
    lines = [f"deny {_shown(network)}; {_until(end_s)}" for network, end_s in _sorted(ends)]
    return "\n".join([_HEADING, *lines, ""])


def plain_text(ends: Ends) -> str:
    """Return one network in each line."""
    lines = [f"{_shown(network)} {_until(end_s)}" for network, end_s in _sorted(ends)]
    return "\n".join([_HEADING, *lines, ""])


def nft_text(ends: Ends) -> str:
    """Return a table that `nft -f` puts in place of the previous one, in one transaction."""
    lines = [_HEADING, "table inet ratekeeper", "delete table inet ratekeeper"]
    lines += ["table inet ratekeeper {"]
    for version in (4, 6):
        lines += [f"    set blocked{version} {{", f"        type ipv{version}_addr"]
        lines += ["        flags interval"]
        elements = [
            f"            {_shown(network)}, {_until(end_s)}"
            for network, end_s in _sorted(ends)
            if network.version == version
        ]
        if elements:
            lines += ["        elements = {", *elements, "        }"]
        lines += ["    }"]
    lines += [
        "    chain input {",
        "        type filter hook input priority filter - 10; policy accept;",
        "        ip saddr @blocked4 drop",
        "        ip6 saddr @blocked6 drop",
        "    }",
        "}",
        "",
    ]
    return "\n".join(lines)


_WRITERS: Final = {"nginx": nginx_text, "nft": nft_text, "plain": plain_text}
