"""`ratekeeper top`: a live view of a running service: rates, denials, busiest keys, latency.

The command calls the service every interval for its metrics, its readiness and its busiest keys.
Counters grow while a service runs, so the difference between two samples, divided by the time
between them, is a rate. Latencies are of the same time. Gauges are those of the later sample.

On a terminal, each frame replaces the last one in one write, so that nothing flickers, and a resize
redraws it at once. In a pipe, frames follow one another as plain lines.

If the service stops answering, the last frame stays with a line that says why, and the command
retries every interval. It ends only if the first call fails.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from threading import Event
from time import monotonic, time
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ratekeeper.cli.common import OK, JsonOption, print_json, print_text, with_options
from ratekeeper.cli.service_client import (
    Buckets,
    Scrape,
    ServiceClient,
    ServiceError,
    bucket_growth,
    growth,
    json_objects,
    quantile_s,
    service_client,
)
from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.store import LOG_FULLNESS_HIGH

INTERVAL_S: Final = 2.0
# Workers write their counts for each other once a second.
INTERVAL_S_MIN: Final = 1.0
INTERVAL_S_MAX: Final = 3_600.0
RULES_MAX: Final = 1_000
KEYS_MAX: Final = 20
# The height of a frame in a pipe.
ROWS_MAX: Final = 40
# The width of a frame in a pipe, where no terminal sets one.
_PIPE_WIDTH: Final = 200
_BREAKERS_SHOWN_MAX: Final = 8
_KEY_CHARACTERS_MAX: Final = 48
_KEY_CHARACTERS_MIN: Final = 4
_BREAKER_STATES: Final = {0: "closed", 1: "half open", 2: "open"}
_BREAKER_COLOURS: Final = {"closed": "green", "half open": "yellow", "open": "bold red"}
_FULL: Final = 0.8


@with_options(service=service_client)
def top(
    service: ServiceClient,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="Time between two frames.")
    ] = INTERVAL_S,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, of one interval, and end.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a running service: allowed and denied checks, the busiest keys, and the store.

    Ctrl-C ends it. The keys that are checked and denied most are shown only to a token with the
    role read or admin; everything else needs no token.

    Exit code: 0 shown; 2 the call failed.

    Example: ratekeeper top

    Example: ratekeeper top --url https://limits.example.com --interval 5

    Example: ratekeeper top --once --json
    """
    if not INTERVAL_S_MIN <= interval <= INTERVAL_S_MAX:
        raise ConfigError(
            f"--interval {interval:g} is not between {INTERVAL_S_MIN:g} and "
            f"{INTERVAL_S_MAX:g} seconds; try {INTERVAL_S:g}"
        )
    with _ends_on_signal(), service:
        frames = FrameReader(service, interval)
        if as_json or once:
            _print_frame(frames.next(), as_json)
        elif (console := Console(highlight=False)).is_terminal:
            _watch(frames, console)
        else:
            _follow(frames)


@contextmanager
def _ends_on_signal() -> Iterator[None]:
    """End with exit code 0 and without a traceback on Ctrl-C and SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(OK) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def wait(woken: Event, seconds: float) -> bool:
    """Wait until the event is set or the time is over. Returns True if it was set."""
    return woken.wait(max(seconds, 0.0))


def _watch(frames: FrameReader, console: Console) -> None:
    """Show frames on a terminal until Ctrl-C."""
    resized = Event()
    before = signal.signal(signal.SIGWINCH, lambda *_: resized.set())
    try:
        # No refresh thread: the screen changes only with a new frame or a new size.
        with Live(console=console, screen=True, auto_refresh=False) as live:
            frame, note = frames.first(), "rates since the service started; current rates follow"
            due_s = monotonic() + frames.interval_s
            while True:
                resized.clear()
                width, height = console.size
                live.update(view(frame, height=height, width=width, note=note), refresh=True)
                if wait(resized, due_s - monotonic()):
                    continue
                due_s = monotonic() + frames.interval_s
                try:
                    frame, note = frames.now(), ""
                except ServiceError as error:
                    note = f"as it was {frames.age_s():.0f} s ago: {error}"
    finally:
        signal.signal(signal.SIGWINCH, before)


def _follow(frames: FrameReader) -> None:
    """Print frames into a pipe until its reader closes it."""
    while True:
        try:
            _print_frame(frames.next(), as_json=False)
            print_text("")
        except ServiceError as error:
            print_text(f"ratekeeper: {error}", to_stderr=True)
            wait(Event(), frames.interval_s)


def _print_frame(frame: TopFrame, as_json: bool) -> None:
    if as_json:
        print_json({"exit_code": OK, **asdict(frame)})
        return
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(view(frame, height=console.height, width=console.width))
        return
    plain = Console(highlight=False, width=_PIPE_WIDTH, no_color=True)
    with plain.capture() as captured:
        plain.print(view(frame))
    lines = (line.rstrip() for line in captured.get().splitlines())
    print_text("\n".join(lines))


# ── Samples and frames ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """The answers of a service at one time. `at_s` is a monotonic time."""

    at_s: float
    metrics: Scrape
    ready: Mapping[str, Any] = field(default_factory=dict)
    checked_most: Mapping[str, Any] | None = None
    """The answer of /v1/admin/top; None if it is not available or the token does not allow it."""
    denied_most: Mapping[str, Any] | None = None
    shadow_denied_most: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RuleRates:
    """The decisions of one rule, per second."""

    rule: str
    allowed: float
    denied: float
    degraded: float
    shadow_denied: float


@dataclass(frozen=True, slots=True)
class BusyKey:
    """One of the keys that are checked or denied most."""

    subject: str
    rule: str
    per_second: float | None


@dataclass(frozen=True, slots=True)
class BreakerStatus:
    """The breaker of one server of the store, in the worst state of all workers."""

    server: str
    state: str
    opened: int


@dataclass(frozen=True, slots=True)
class LatencyQuantiles:
    """The latency of the calls in an interval; None if there were none."""

    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class TopFrame:
    """Everything that one frame shows."""

    url: str
    seconds: float
    """The length of the interval."""
    node: str
    version: str
    status: str
    workers: int
    rules_version: str
    """Several versions if workers differ."""
    rules_age_s: float | None
    rules_error: str
    store_healthy: bool | None
    store_error: str
    allowed: float
    """Checks a second, each counted once, however many rules apply to it."""
    denied: float
    degraded: float
    unruled: float
    """Checks that no rule decided: on a list, or without a rule that applies."""
    busiest_subject: float | None
    """Checks per second of the busiest subject; None if the service does not say."""
    rules: tuple[RuleRates, ...]
    decision: LatencyQuantiles
    store: LatencyQuantiles
    store_errors: Mapping[str, float]
    store_states: int | None
    store_states_max: int | None
    store_bytes: int | None
    store_log_bytes: int | None
    store_log_bytes_max: int | None
    denied_cache_hits: float
    coalesced: float
    records_dropped: float
    fleet_nodes: int | None
    """Nodes that share the limits; None if the service is no node of a fleet."""
    fleet_answered: float
    """Checks a second of leased and eventual rules that the node answered without a call."""
    fleet_asked: float
    """Those that the authority decided."""
    fleet_pending: int | None
    """Units that the node has admitted and not reported yet."""
    breakers: tuple[BreakerStatus, ...]
    checked_most: tuple[BusyKey, ...] | None
    denied_most: tuple[BusyKey, ...] | None
    shadow_denied_most: tuple[BusyKey, ...] | None
    """The keys that rules in shadow mode would deny most."""


class FrameReader:
    """Calls a service again and again, and makes frames of its answers."""

    def __init__(self, service: ServiceClient, interval_s: float) -> None:
        self._service = service
        self.interval_s = interval_s
        self._last = self._sample()

    def age_s(self) -> float:
        """Return the time since the last answer."""
        return monotonic() - self._last.at_s

    def first(self) -> TopFrame:
        """Return a frame of the whole time since the service started, without waiting."""
        started_s = self._last.metrics.value("ratekeeper_start_time_seconds")
        # The start is by the service's clock. If the clocks differ much, this frame is wrong.
        ran_s = self.interval_s if started_s is None else max(time() - started_s, self.interval_s)
        before = ServiceSample(self._last.at_s - ran_s, Scrape())
        return frame_of(self._service.url, before, self._last)

    def next(self) -> TopFrame:
        """Wait for the end of the interval, and return its frame. Raises ServiceError."""
        wait(Event(), self._last.at_s + self.interval_s - monotonic())
        return self.now()

    def now(self) -> TopFrame:
        """Return a frame of the time since the last answer. Raises ServiceError."""
        found = self._sample()
        before, self._last = self._last, found
        return frame_of(self._service.url, before, found)

    def _sample(self) -> ServiceSample:
        metrics = self._service.metrics()
        # After the call: counts include everything that happened while it waited.
        at_s = monotonic()
        ready = self._service.call("GET", "/readyz", expected="status")
        return replace(
            ServiceSample(at_s, metrics, ready),
            checked_most=self._busiest("checks"),
            denied_most=self._busiest("denied"),
            shadow_denied_most=self._busiest("shadow_denied"),
        )

    def _busiest(self, by: str) -> dict[str, Any] | None:
        """Return the busiest keys; None if the service has no such list for this token."""
        query = {"by": by, "limit": str(KEYS_MAX)}
        try:
            return self._service.call("GET", "/v1/admin/top", query=query, expected="items")
        except ServiceError as error:
            # 400: an earlier version of the service has no list of shadow denials.
            if error.status in {400, 401, 403, 404, 422}:
                return None
            raise


def frame_of(url: str, before: ServiceSample, now: ServiceSample) -> TopFrame:
    """Return the frame of the time between two samples."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    between = MetricsInterval(before.metrics, now.metrics, seconds)
    checks = between.rates("ratekeeper_checks_total", "outcome")
    fleet = between.rates("ratekeeper_fleet_checks_total", "outcome")
    ready, metrics = now.ready, now.metrics
    rules_status, store = _mapping(ready.get("rules")), _mapping(ready.get("store"))
    age_s = rules_status.get("age_seconds", metrics.value("ratekeeper_rules_age_seconds"))
    versions = [each for each in metrics.by("ratekeeper_rules_info", "version") if each]
    return TopFrame(
        url=url,
        seconds=round(seconds, 3),
        node=str(ready.get("node", "")),
        version=", ".join(metrics.by("ratekeeper_build_info", "version")),
        status=str(ready.get("status", "")),
        workers=round(metrics.value("ratekeeper_workers") or 0),
        rules_version=", ".join(sorted(versions)) or str(rules_status.get("version") or ""),
        rules_age_s=age_s if isinstance(age_s, int | float) else None,
        rules_error=str(rules_status.get("error") or ""),
        store_healthy=store.get("healthy"),
        store_error=str(store.get("error") or ""),
        allowed=checks.get("allowed", 0.0),
        denied=checks.get("denied", 0.0) + checks.get("unavailable", 0.0),
        degraded=between.rate("ratekeeper_degraded_checks_total"),
        unruled=sum(checks.get(each, 0.0) for each in ("unlimited", "exempt", "blocked")),
        busiest_subject=metrics.value("ratekeeper_busiest_subject_rate"),
        rules=between.rules(),
        decision=between.latency("ratekeeper_decision_seconds"),
        store=between.latency("ratekeeper_store_seconds"),
        store_errors=between.rates("ratekeeper_store_errors_total", "kind"),
        store_states=_whole(metrics.value("ratekeeper_store_states")),
        store_states_max=_whole(metrics.value("ratekeeper_store_states_max")),
        store_bytes=_whole(metrics.value("ratekeeper_store_bytes")),
        store_log_bytes=_whole(metrics.value("ratekeeper_store_log_bytes")),
        store_log_bytes_max=_whole(metrics.value("ratekeeper_store_log_bytes_max")),
        denied_cache_hits=between.rate("ratekeeper_denied_cache_hits_total"),
        coalesced=between.rate("ratekeeper_coalesced_checks_total"),
        records_dropped=between.rate("ratekeeper_records_dropped_total"),
        fleet_nodes=_whole(metrics.value("ratekeeper_fleet_live_nodes")),
        fleet_answered=sum(rate for outcome, rate in fleet.items() if outcome != "asked"),
        fleet_asked=fleet.get("asked", 0.0),
        fleet_pending=_whole(metrics.value("ratekeeper_fleet_pending_units")),
        breakers=_breakers(metrics),
        checked_most=_keys(now.checked_most),
        denied_most=_keys(now.denied_most),
        shadow_denied_most=_keys(now.shadow_denied_most),
    )


class MetricsInterval:
    """Two scrapes, and the time between them."""

    def __init__(self, before: Scrape, now: Scrape, seconds: float) -> None:
        self._before = before
        self._now = now
        self._seconds = seconds

    def rate(self, name: str, **labels: str) -> float:
        """Return the growth per second of the samples that have these labels."""
        before, now = (each.total(name, **labels) for each in (self._before, self._now))
        return round(growth(before, now) / self._seconds, 3)

    def rates(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the growth per second by the values of one label."""
        before = self._before.by(name, label, **labels)
        now = self._now.by(name, label, **labels)
        return {
            each: round(growth(before.get(each, 0.0), count) / self._seconds, 3)
            for each, count in now.items()
        }

    def latency(self, name: str) -> LatencyQuantiles:
        """Return the quantiles of a histogram in this interval."""
        found: Buckets = bucket_growth(self._before.buckets(name), self._now.buckets(name))
        return LatencyQuantiles(quantile_s(found, 0.5), quantile_s(found, 0.99))

    def rules(self) -> tuple[RuleRates, ...]:
        """Return the rules, busiest first. The service omits a rule that has decided nothing."""
        decisions = "ratekeeper_rule_decisions_total"
        allowed, denied, shadow = (
            self.rates(decisions, "rule", outcome=each)
            for each in ("allowed", "denied", "shadow_denied")
        )
        degraded = self.rates("ratekeeper_rule_failures_total", "rule")
        found = [
            RuleRates(
                rule,
                allowed.get(rule, 0.0),
                denied.get(rule, 0.0),
                degraded.get(rule, 0.0),
                shadow.get(rule, 0.0),
            )
            for rule in {**allowed, **denied, **shadow, **degraded}
        ]
        found.sort(key=lambda rule: (-(rule.allowed + rule.denied), rule.rule))
        return tuple(found[:RULES_MAX])


def _breakers(metrics: Scrape) -> tuple[BreakerStatus, ...]:
    """Return the breakers, open ones first."""
    states = metrics.by("ratekeeper_breaker_state", "server")
    opened = metrics.by("ratekeeper_breaker_opened_total", "server")
    worst_first = sorted(states.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        BreakerStatus(server, _BREAKER_STATES.get(round(state), "?"), round(opened.get(server, 0)))
        for server, state in worst_first
    )


def _keys(answer: Mapping[str, Any] | None) -> tuple[BusyKey, ...] | None:
    """Return the keys in an answer of /v1/admin/top."""
    if answer is None:
        return None
    return tuple(
        BusyKey(_subject(each.get("subject")), str(each.get("rule", "")), _rate(each))
        for each in json_objects(answer.get("items"))[:KEYS_MAX]
    )


def _subject(parts: object) -> str:
    """Return a subject as text; "?" if the service does not record subjects."""
    return " ".join(map(str, parts)) if isinstance(parts, list) and parts else "?"


def _rate(each: Mapping[str, Any]) -> float | None:
    rate = each.get("per_second")
    return float(rate) if isinstance(rate, int | float) else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


# ── On a terminal ──────────────────────────────────────────────────────────────────────────────


def view(
    frame: TopFrame, *, height: int | None = None, width: int | None = None, note: str = ""
) -> RenderableType:
    """Render a frame in at most `height` lines; `note` is a line above the tables."""
    head = _head(frame, note)
    keys = max(len(each or ()) for _, each in _key_lists(frame))
    shown = (ROWS_MAX if height is None else height) - len(head.rows) - 2
    # Keys get up to half of the lines; rules get the rest.
    key_rows = min(keys, max(shown // 2 - 2, 1)) if keys else 0
    rule_rows = max(shown - (key_rows + 2 if key_rows else 0), 1)
    parts: list[RenderableType] = [head, Text(), _rules(frame.rules, rule_rows)]
    if key_rows:
        parts += [Text(), _busiest_keys(frame, key_rows, width)]
    return Group(*parts)


def _head(frame: TopFrame, note: str) -> Table:
    table = Table.grid(padding=(0, 2))
    # One line each: text that does not fit ends in an ellipsis.
    table.add_column(style="bold", no_wrap=True, min_width=len("breakers"))
    table.add_column(no_wrap=True, overflow="ellipsis")
    named = "  ".join(filter(None, (frame.node, frame.status, frame.version)))
    workers = f"{frame.workers} worker{'' if frame.workers == 1 else 's'}"
    table.add_row("service", Text(f"{frame.url}  {named}  {workers}"))
    table.add_row("rules", _rules_text(frame))
    table.add_row("checks", _checks_text(frame))
    table.add_row("store", _store_text(frame))
    table.add_row("calls", _calls_text(frame))
    if frame.fleet_nodes is not None:
        table.add_row("fleet", _fleet_text(frame))
    if frame.breakers:
        table.add_row("breakers", _breakers_text(frame.breakers))
    if note:
        table.add_row("", Text(_line(note), style="yellow"))
    return table


def _rules_text(frame: TopFrame) -> Text:
    several = " (workers differ)" if "," in frame.rules_version else ""
    age = "" if frame.rules_age_s is None else f", confirmed {_time(frame.rules_age_s)} ago"
    text = Text(f"version {frame.rules_version or '?'}{several}{age}")
    if frame.rules_error:
        text.append(f"; {_line(frame.rules_error)}", style="bold red")
    return text


def _checks_text(frame: TopFrame) -> Text:
    decided = frame.allowed + frame.denied
    share = f" ({frame.denied / decided:.1%})" if decided else ""
    text = Text(f"{_per_second(frame.allowed)} allowed, ")
    text.append(
        f"{_per_second(frame.denied)} denied{share}", style="yellow" if frame.denied else ""
    )
    text.append(", ")
    text.append(
        f"{_per_second(frame.degraded)} degraded", style="bold red" if frame.degraded else ""
    )
    if frame.unruled:
        text.append(f", {_per_second(frame.unruled)} without a rule")
    if frame.busiest_subject:
        text.append(f"; busiest subject {_per_second(frame.busiest_subject)}")
    return text


def _store_text(frame: TopFrame) -> Text:
    text = Text()
    if frame.store_healthy is False:
        text.append(f"not healthy: {_line(frame.store_error)}", style="bold red")
    else:
        text.append("healthy" if frame.store_healthy else "?")
    text.append(f", calls took {_latency(frame.store)}")
    if frame.store_states is not None:
        text.append(f"; {frame.store_states:,} states")
        if frame.store_states_max:
            share = frame.store_states / frame.store_states_max
            style = "bold red" if share >= _FULL else ""
            text.append(f" of {frame.store_states_max:,} ({share:.0%})", style=style)
    if frame.store_bytes:
        text.append(f", {frame.store_bytes / 2**20:,.1f} MiB")
    if frame.store_log_bytes and frame.store_log_bytes_max:
        share = frame.store_log_bytes / frame.store_log_bytes_max
        style = "bold red" if share >= LOG_FULLNESS_HIGH else ""
        text.append(f", logs {share:.0%}", style=style)
    for kind, rate in frame.store_errors.items():
        if rate:
            text.append(f", {_per_second(rate)} {kind}", style="bold red")
    return text


def _calls_text(frame: TopFrame) -> Text:
    text = Text(
        f"decisions took {_latency(frame.decision)}; {_per_second(frame.denied_cache_hits)} from "
        f"the denial cache, {_per_second(frame.coalesced)} coalesced"
    )
    if frame.records_dropped:
        text.append(f", {_per_second(frame.records_dropped)} records lost", style="bold red")
    return text


def _fleet_text(frame: TopFrame) -> Text:
    nodes = frame.fleet_nodes or 1
    text = Text(f"{nodes:,} node{'' if nodes == 1 else 's'}; ")
    checks = frame.fleet_answered + frame.fleet_asked
    if checks:
        share = frame.fleet_answered / checks
        text.append(f"{share:.1%} of {_per_second(checks)} answered in the node")
    else:
        text.append("no checks of leased or eventual rules")
    if frame.fleet_pending:
        text.append(f"; {frame.fleet_pending:,} units pending")
    return text


def _breakers_text(breakers: Sequence[BreakerStatus]) -> Text:
    text = Text()
    for breaker in breakers[:_BREAKERS_SHOWN_MAX]:
        text.append(f"{breaker.server} ")
        text.append(breaker.state, style=_BREAKER_COLOURS.get(breaker.state, ""))
        text.append(f" (opened {breaker.opened:,} times)  " if breaker.opened else "  ")
    if len(breakers) > _BREAKERS_SHOWN_MAX:
        text.append(f"and {len(breakers) - _BREAKERS_SHOWN_MAX} more")
    return text


def _rules(rules: Sequence[RuleRates], rows: int) -> Table:
    table = _table(("RULE", "ALLOWED/S", "DENIED/S", "DENIED", "SHADOW/S", "DEGRADED/S"))
    fit = rules if len(rules) <= rows else rules[: max(rows - 1, 0)]
    for rule in fit:
        decided = rule.allowed + rule.denied
        table.add_row(
            Text(_line(rule.rule)),
            _rate_text(rule.allowed),
            _rate_text(rule.denied, "yellow"),
            Text(f"{rule.denied / decided:.1%}" if decided else "-"),
            _rate_text(rule.shadow_denied),
            _rate_text(rule.degraded, "bold red"),
        )
    if len(fit) < len(rules):
        table.add_row(Text(f"and {len(rules) - len(fit)} more", style="dim"))
    if not rules:
        table.add_row(Text("no rule has decided anything yet", style="dim"))
    return table


def _key_lists(frame: TopFrame) -> list[tuple[str, tuple[BusyKey, ...] | None]]:
    """Return the lists of keys to show, with their headings; that of shadow rules if it has any."""
    lists = [("CHECKED MOST", frame.checked_most), ("DENIED MOST", frame.denied_most)]
    if frame.shadow_denied_most:
        lists.append(("SHADOW DENIED MOST", frame.shadow_denied_most))
    return lists


def _busiest_keys(frame: TopFrame, rows: int, width: int | None) -> Table:
    """Render the lists of keys side by side."""
    lists = _key_lists(frame)
    headings = [text for heading, _ in lists for text in (heading, "RULE", "/S")]
    firsts = range(0, len(headings), 3)
    table = _table(headings, text=[place for first in firsts for place in (first, first + 1)])
    columns: list[Text] = [Text(heading) for heading in headings]
    lines = [[Text()] * len(headings) for _ in range(rows)]
    for first, (_, keys) in zip(firsts, lists, strict=True):
        for line, key in zip(lines, keys or (), strict=False):
            rate = "" if key.per_second is None else _number(key.per_second)
            line[first : first + 3] = Text(_line(key.subject)), Text(_line(key.rule)), Text(rate)
    widths = [max(each.cell_len for each in column) for column in zip(columns, *lines, strict=True)]
    subject, rule = _fitting(widths, width)
    for line in lines:
        for first in firsts:
            line[first].truncate(subject, overflow="ellipsis")
            line[first + 1].truncate(rule, overflow="ellipsis")
        table.add_row(*line)
    return table


def _fitting(widths: Sequence[int], width: int | None) -> tuple[int, int]:
    """Return the widths of subjects and rules that leave room for the rates."""
    if width is None:
        return _KEY_CHARACTERS_MAX, _KEY_CHARACTERS_MAX
    gaps = 2 * (len(widths) - 1)
    each = (width - gaps - sum(widths[2::3])) // (len(widths) // 3)
    rule = min(max(widths[1::3]), max(each // 3, _KEY_CHARACTERS_MIN))
    return min(max(each - rule, _KEY_CHARACTERS_MIN), _KEY_CHARACTERS_MAX), rule


def _table(headings: Sequence[str], text: Sequence[int] = (0,)) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for place, heading in enumerate(headings):
        side: Any = "left" if place in text else "right"
        table.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis")
    return table


def _rate_text(rate: float, style: str = "") -> Text:
    return Text(_number(rate), style=style if rate else "")


def _number(rate: float) -> str:
    if not rate:
        return "0"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}"


def _per_second(rate: float) -> str:
    return f"{_number(rate)}/s"


def _latency(latency: LatencyQuantiles) -> str:
    if latency.p50_s is None or latency.p99_s is None:
        return "- (no calls)"
    return f"p50 {_time(latency.p50_s)}, p99 {_time(latency.p99_s)}"


def _time(seconds: float) -> str:
    """Return a duration to three digits in a readable unit.

    >>> _time(0.00004), _time(0.0123), _time(2.5), _time(7200)
    ('40 µs', '12.3 ms', '2.5 s', '2 h')
    """
    for unit, size in (("h", 3_600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _line(text: str, characters_max: int = 200) -> str:
    """Return text of another program, cut, and without terminal escapes."""
    shown = "".join(each if each.isprintable() else " " for each in text)
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"
