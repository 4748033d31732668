"""`tollkeeper reconcile`: the command. What it looks at, and what it finds, is in `reconcile.py`.

The rules may change while it runs as a job, so they are read anew each time, as are the counts of
the service that runs with them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Annotated, Any, Final

import typer

from tollkeeper.cli.reconcile import Asked, Repairing, reconcile
from tollkeeper.cli.reconcile_print import report_data, say_line, say_report
from tollkeeper.cli.reconcile_used import rules_used
from tollkeeper.cli.remote import TIMEOUT_S, CaOption, RemoteCommand, TimeoutOption, TokenOption
from tollkeeper.cli.remote_service import Unanswered
from tollkeeper.cli.rules_options import JsonOption
from tollkeeper.cli.rules_print import OK, TROUBLE, say_json, telling, time_text
from tollkeeper.cli.rules_read import existing, from_database, from_file
from tollkeeper.cli.scrape import Watched, read
from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import ConfigError, TollkeeperError, show
from tollkeeper.core.rates import UNIT_NS
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import from_data

LIMIT_KEYS: Final = 1_000_000
PAUSE_MS: Final = 2.0
PAUSE_MS_MAX: Final = 60_000.0
TIME_S_MIN: Final = 1.0
TIME_S_MAX: Final = 366 * 86_400.0
SINCE: Final = "7d"

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="TOLLKEEPER_STORE",
        metavar="URI",
        help="The store, as given to a Limiter. In the variable, a password is seen by nobody "
        "who lists the machine's processes.",
    ),
]
RulesOption = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="FILE|URL",
        help="The rules in force: a document, or a database that holds them. [default: those of "
        "the service at --url]",
    ),
]
ServiceOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="TOLLKEEPER_URL",
        metavar="URL",
        help="A service that runs with them, to ask which rules were met.",
    ),
]
RecordsOption = Annotated[
    str | None,
    typer.Option(
        "--records",
        metavar="URL",
        help="The database that usage is recorded in, to ask which rules were met.",
    ),
]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="TIME", help="How far back to ask it: 90m, 12h, 7d.")
]
RepairOption = Annotated[
    str | None,
    typer.Option(
        "--repair",
        metavar="[=all]",
        help="Set the missing expiries. With =all, remove what cannot be read, too. Without it, "
        "nothing is changed.",
    ),
]
EveryOption = Annotated[
    str | None,
    typer.Option(
        "--every", metavar="TIME", help="Again and again, until stopped, a JSON line each: 1h."
    ),
]
LimitOption = Annotated[
    int, typer.Option("--limit-keys", metavar="N", help="At most so many a primary; 0: all.")
]
PauseOption = Annotated[
    float, typer.Option("--pause", metavar="MS", help="How long to rest after each 100 keys.")
]
PrefixOption = Annotated[
    str | None,
    typer.Option("--prefix", help="What every key in Redis begins with.", metavar="TEXT"),
]


class ReconcileCommand(RemoteCommand):
    """A command whose `--repair` may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, with what `--repair` alone stands for."""
        given: list[str] = []
        for place, word in enumerate(args):
            alone = word == "--repair" and args[place + 1 : place + 2] not in (["all"], ["expiry"])
            given.append("--repair=expiry" if alone else word)
        return super().parse_args(ctx, given)


def reconcile_command(
    store: StoreOption,
    rules: RulesOption = None,
    url: ServiceOption = None,
    records: RecordsOption = None,
    since: SinceOption = SINCE,
    repair: RepairOption = None,
    every: EveryOption = None,
    limit_keys: LimitOption = LIMIT_KEYS,
    pause: PauseOption = PAUSE_MS,
    prefix: PrefixOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Look over what a store holds: what never expires, cannot be read, or has drifted apart.

    Walks every key of ours in Redis, in small steps with a rest in between, and compares replicas
    with their primaries. Told the rules, it also says which are never met. Nothing is changed
    without --repair, and keys of other prefixes never are.

    Exit code: 0 all is well; 1 something was found; 2 it could not be looked at.

    Example: tollkeeper reconcile --store redis://localhost:6379 --rules limits.yaml

    Example: tollkeeper reconcile --store redis+cluster://h1:7000,h2:7000 --repair

    Example: tollkeeper reconcile --store redis://localhost:6379 --every 1h >> reconcile.log
    """
    with telling(as_json, problems=TROUBLE):
        service = _Service(url, token, timeout, ca)
        since_s = _seconds("--since", since)
        asked = Asked(
            store,
            {} if prefix is None else {"prefix": prefix},
            repair=_repairing(repair),
            keys_max=_keys_max(limit_keys),
            pause_seconds=_pause_s(pause),
        )
        round_ = _Round(asked, rules, service, records, since_s)
        if every is not None:
            _again_and_again(round_, _seconds("--every", every))
            raise typer.Exit(OK)
        report = reconcile(round_.asked_now())
        if as_json:
            say_json(report_data(report))
        else:
            say_report(report)
        raise typer.Exit(report.exit_code)


# ── What is given ──────────────────────────────────────────────────────────────────────────────


def _repairing(text: str | None) -> Repairing:
    match text:
        case None:
            return "no"
        case "expiry" | "all":
            return text
        case _:
            raise ConfigError(f"--repair={show(text)} is not known; there are --repair and =all")


def _keys_max(count: int) -> int:
    if count < 0:
        raise ConfigError(f"--limit-keys {count} is less than 0, which stands for all of them")
    return count


def _pause_s(pause_ms: float) -> float:
    if not 0 <= pause_ms <= PAUSE_MS_MAX:
        raise ConfigError(f"--pause {pause_ms:g} is not between 0 and {PAUSE_MS_MAX:g} ms; try 2")
    return pause_ms / 1_000


def _seconds(option: str, text: str) -> float:
    """A length of time as people write it: a number, and a unit if it is not seconds."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit_ns = UNIT_NS.get(text[len(digits) :] or "s")
    plain = digits.isascii() and digits.replace(".", "", 1).isdigit() and len(digits) <= 12
    seconds = float(digits) * unit_ns / NS_PER_SECOND if plain and unit_ns else 0.0
    if not TIME_S_MIN <= seconds <= TIME_S_MAX:
        raise ConfigError(
            f"{option} {show(text)} is not a length of time from 1 second to 366 days; "
            f"try 90s, 10m, 1h or 7d"
        )
    return seconds


# ── One round, and the next ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Service:
    """How a running service is asked, if there is one."""

    url: str | None
    token: str | None
    timeout_s: float
    ca: str | None

    def open(self) -> Watched | None:
        if self.url is None:
            return None
        return Watched(self.url, self.token, timeout_s=self.timeout_s, ca_file=self.ca)


@dataclass(frozen=True, slots=True)
class _Round:
    """What to look at, with what changes from one time to the next."""

    asked: Asked
    rules: str | None
    service: _Service
    records: str | None
    since_s: float

    def asked_now(self) -> Asked:
        """With the rules and the counts of now. Raises ConfigError, StoreError, Unanswered."""
        document = None if self.rules is None else _read_rules(self.rules)
        metrics = None
        service = self.service.open()
        if service is not None:
            with service:
                metrics = read(service.scrape())
                document = document or _rules_of(service)
        found = replace(self.asked, document=document, metrics=metrics)
        if self.records is None or document is None:
            return found
        began = datetime.now(UTC) - timedelta(seconds=self.since_s)
        used = asyncio.run(rules_used(self.records, began))
        return replace(found, used=used, used_since=time_text(began))


def _read_rules(name: str) -> Document:
    if "://" in name:
        return existing(from_database(name)).document()
    return from_file(name).document()


def _rules_of(service: Watched) -> Document | None:
    """The rules that a service has; None where this token may not see them."""
    try:
        return from_data(service.ask("GET", "/v1/admin/rules", expected="rules"), service.url)
    except Unanswered as error:
        if error.status in {401, 403, 404}:
            return None
        raise


@contextmanager
def _until_told() -> Iterator[Event]:
    """An event that SIGTERM and Ctrl-C set: what is being done is finished first."""
    told = Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: told.set()) for number in numbers]
    try:
        yield told
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _again_and_again(round_: _Round, every_s: float) -> None:
    """A line each time, also when it cannot be done: the next time it may."""
    with _until_told() as told:
        while not told.is_set():
            try:
                say_line(report_data(reconcile(round_.asked_now())))
            except TollkeeperError as error:
                at = datetime.now(UTC).isoformat(timespec="seconds")
                say_line({"at": at, "exit_code": TROUBLE, "error": str(error)})
            told.wait(every_s)
