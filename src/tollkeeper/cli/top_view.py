"""What `tollkeeper top` shows: a frame from two samples of a service, and its look on a terminal.

Pure: asks nobody. Counters say how often something happened since the service started; the
difference of two samples, by the time between them, is a rate. Quantiles are of that time alone,
too. Gauges are as the later sample tells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tollkeeper.cli.remote_print import dicts
from tollkeeper.cli.scrape import Buckets, Scrape, grown, grown_buckets, quantile_s

RULES_MAX: Final = 1_000
KEYS_MAX: Final = 20
# Where nobody knows how high the terminal is, such as in a pipe.
ROWS_MAX: Final = 40
_BREAKERS_SHOWN_MAX: Final = 8
_KEY_CHARACTERS_MAX: Final = 48
_KEY_CHARACTERS_MIN: Final = 4
_STATES: Final = {0: "closed", 1: "half open", 2: "open"}
_COLOURS: Final = {"closed": "green", "half open": "yellow", "open": "bold red"}
_FULL: Final = 0.8


@dataclass(frozen=True, slots=True)
class Sample:
    """What was asked at one time. `at_s` counts from anywhere."""

    at_s: float
    metrics: Scrape
    ready: Mapping[str, Any] = field(default_factory=dict)
    checked_most: Mapping[str, Any] | None = None
    """What /v1/admin/top says; None where there is no such thing, or not for this token."""
    denied_most: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RuleRates:
    """What one rule decided, by the second."""

    rule: str
    allowed: float
    denied: float
    degraded: float
    shadow_denied: float


@dataclass(frozen=True, slots=True)
class Key:
    """One of those who come most."""

    subject: str
    rule: str
    per_second: float | None


@dataclass(frozen=True, slots=True)
class Breaker:
    """One server of the store, as the worst of the workers has it."""

    node: str
    state: str
    opened: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the calls of this time; None: there were none."""

    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Frame:
    """What there is to see at one time."""

    url: str
    seconds: float
    """That the rates are of."""
    node: str
    version: str
    status: str
    workers: int
    rules_version: str
    """Several, where workers differ."""
    rules_age_s: float | None
    rules_error: str
    store_healthy: bool | None
    store_error: str
    allowed: float
    denied: float
    degraded: float
    unruled: float
    """Checks that no rule decided: lists, or no rule for them."""
    rules: tuple[RuleRates, ...]
    decision: Latency
    store: Latency
    store_errors: Mapping[str, float]
    store_states: int | None
    store_states_max: int | None
    store_bytes: int | None
    denied_cache_hits: float
    coalesced: float
    records_dropped: float
    breakers: tuple[Breaker, ...]
    checked_most: tuple[Key, ...] | None
    denied_most: tuple[Key, ...] | None


def frame_of(url: str, before: Sample, now: Sample) -> Frame:
    """What happened between two samples, and how it is now."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    between = _Between(before.metrics, now.metrics, seconds)
    rules = between.rules()
    ready, metrics = now.ready, now.metrics
    told, store = _mapping(ready.get("rules")), _mapping(ready.get("store"))
    age_s = told.get("age_seconds", metrics.value("tollkeeper_rules_age_seconds"))
    versions = [each for each in metrics.by("tollkeeper_rules_info", "version") if each]
    return Frame(
        url=url,
        seconds=round(seconds, 3),
        node=str(ready.get("node", "")),
        version=", ".join(metrics.by("tollkeeper_build_info", "version")),
        status=str(ready.get("status", "")),
        workers=round(metrics.value("tollkeeper_workers") or 0),
        rules_version=", ".join(sorted(versions)) or str(told.get("version") or ""),
        rules_age_s=age_s if isinstance(age_s, int | float) else None,
        rules_error=str(told.get("error") or ""),
        store_healthy=store.get("healthy"),
        store_error=str(store.get("error") or ""),
        allowed=sum(rule.allowed for rule in rules),
        denied=sum(rule.denied for rule in rules),
        degraded=sum(rule.degraded for rule in rules),
        unruled=between.rate("tollkeeper_checks_total", source="none"),
        rules=rules,
        decision=between.latency("tollkeeper_decision_seconds"),
        store=between.latency("tollkeeper_store_seconds"),
        store_errors=between.rates("tollkeeper_store_errors_total", "kind"),
        store_states=_whole(metrics.value("tollkeeper_store_states")),
        store_states_max=_whole(metrics.value("tollkeeper_store_states_max")),
        store_bytes=_whole(metrics.value("tollkeeper_store_bytes")),
        denied_cache_hits=between.rate("tollkeeper_denied_cache_hits_total"),
        coalesced=between.rate("tollkeeper_coalesced_checks_total"),
        records_dropped=between.rate("tollkeeper_records_dropped_total"),
        breakers=_breakers(metrics),
        checked_most=_keys(now.checked_most),
        denied_most=_keys(now.denied_most),
    )


class _Between:
    """Two scrapes, and the time between them."""

    def __init__(self, before: Scrape, now: Scrape, seconds: float) -> None:
        self._before = before
        self._now = now
        self._seconds = seconds

    def rate(self, name: str, **labels: str) -> float:
        before, now = (each.total(name, **labels) for each in (self._before, self._now))
        return round(grown(before, now) / self._seconds, 3)

    def rates(self, name: str, label: str, **labels: str) -> dict[str, float]:
        before = self._before.by(name, label, **labels)
        now = self._now.by(name, label, **labels)
        return {
            each: round(grown(before.get(each, 0.0), count) / self._seconds, 3)
            for each, count in now.items()
        }

    def latency(self, name: str) -> Latency:
        found: Buckets = grown_buckets(self._before.buckets(name), self._now.buckets(name))
        return Latency(quantile_s(found, 0.5), quantile_s(found, 0.99))

    def rules(self) -> tuple[RuleRates, ...]:
        """The busiest first; one that has decided nothing yet is not told of by the service."""
        checks = "tollkeeper_checks_total"
        allowed, denied, shadow = (
            self.rates(checks, "rule", outcome=each)
            for each in ("allowed", "denied", "shadow_denied")
        )
        degraded = self.rates("tollkeeper_degraded_checks_total", "rule")
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


def _breakers(metrics: Scrape) -> tuple[Breaker, ...]:
    """Those that are not closed first."""
    states = metrics.by("tollkeeper_breaker_state", "node")
    opened = metrics.by("tollkeeper_breaker_opened_total", "node")
    worst_first = sorted(states.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        Breaker(node, _STATES.get(round(state), "?"), round(opened.get(node, 0)))
        for node, state in worst_first
    )


def _keys(answer: Mapping[str, Any] | None) -> tuple[Key, ...] | None:
    """Who comes most, as far as it can be understood."""
    if answer is None:
        return None
    return tuple(
        Key(_subject(each.get("subject")), str(each.get("rule", "")), _rate(each))
        for each in dicts(answer.get("items"))[:KEYS_MAX]
    )


def _subject(told: object) -> str:
    """Its parts beside each other; none where the service records nobody's name."""
    return " ".join(map(str, told)) if isinstance(told, list) and told else "?"


def _rate(each: Mapping[str, Any]) -> float | None:
    rate = each.get("per_second")
    return float(rate) if isinstance(rate, int | float) else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


# ── On a terminal ──────────────────────────────────────────────────────────────────────────────


def view(
    frame: Frame, *, height: int | None = None, width: int | None = None, note: str = ""
) -> RenderableType:
    """The frame, no higher than `height` lines; `note` is what to know about it."""
    head = _head(frame, note)
    keys = max(len(frame.checked_most or ()), len(frame.denied_most or ()))
    shown = (ROWS_MAX if height is None else height) - len(head.rows) - 2
    # Keys get up to half of the lines; what they do not need is for rules.
    key_rows = min(keys, max(shown // 2 - 2, 1)) if keys else 0
    rule_rows = max(shown - (key_rows + 2 if key_rows else 0), 1)
    parts: list[RenderableType] = [head, Text(), _rules(frame.rules, rule_rows)]
    if key_rows:
        parts += [Text(), _most(frame, key_rows, width)]
    return Group(*parts)


def _head(frame: Frame, note: str) -> Table:
    table = Table.grid(padding=(0, 2))
    # A line each: what does not fit ends in dots, and the next line stays where it is.
    table.add_column(style="bold", no_wrap=True, min_width=len("breakers"))
    table.add_column(no_wrap=True, overflow="ellipsis")
    named = "  ".join(filter(None, (frame.node, frame.status, frame.version)))
    workers = f"{frame.workers} worker{'' if frame.workers == 1 else 's'}"
    table.add_row("service", Text(f"{frame.url}  {named}  {workers}"))
    table.add_row("rules", _rules_text(frame))
    table.add_row("checks", _checks_text(frame))
    table.add_row("store", _store_text(frame))
    table.add_row("calls", _calls_text(frame))
    if frame.breakers:
        table.add_row("breakers", _breakers_text(frame.breakers))
    if note:
        table.add_row("", Text(_line(note), style="yellow"))
    return table


def _rules_text(frame: Frame) -> Text:
    several = " (workers differ)" if "," in frame.rules_version else ""
    age = "" if frame.rules_age_s is None else f", confirmed {_time(frame.rules_age_s)} ago"
    text = Text(f"version {frame.rules_version or '?'}{several}{age}")
    if frame.rules_error:
        text.append(f"; {_line(frame.rules_error)}", style="bold red")
    return text


def _checks_text(frame: Frame) -> Text:
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
    return text


def _store_text(frame: Frame) -> Text:
    text = Text()
    if frame.store_healthy is False:
        text.append(f"away: {_line(frame.store_error)}", style="bold red")
    else:
        text.append("healthy" if frame.store_healthy else "?")
    text.append(f", waited for {_latency(frame.store)}")
    if frame.store_states is not None:
        text.append(f"; {frame.store_states:,} states")
        if frame.store_states_max:
            share = frame.store_states / frame.store_states_max
            style = "bold red" if share >= _FULL else ""
            text.append(f" of {frame.store_states_max:,} ({share:.0%})", style=style)
    if frame.store_bytes:
        text.append(f", {frame.store_bytes / 2**20:,.1f} MiB")
    for kind, rate in frame.store_errors.items():
        if rate:
            text.append(f", {_per_second(rate)} {kind}", style="bold red")
    return text


def _calls_text(frame: Frame) -> Text:
    text = Text(
        f"decided in {_latency(frame.decision)}; {_per_second(frame.denied_cache_hits)} denied "
        f"from memory, {_per_second(frame.coalesced)} sent together"
    )
    if frame.records_dropped:
        text.append(f", {_per_second(frame.records_dropped)} records lost", style="bold red")
    return text


def _breakers_text(breakers: Sequence[Breaker]) -> Text:
    text = Text()
    for breaker in breakers[:_BREAKERS_SHOWN_MAX]:
        text.append(f"{breaker.node} ")
        text.append(breaker.state, style=_COLOURS.get(breaker.state, ""))
        text.append(f" ({breaker.opened:,} times opened)  " if breaker.opened else "  ")
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


def _most(frame: Frame, rows: int, width: int | None) -> Table:
    """Two lists beside each other."""
    headings = ("CHECKED MOST", "RULE", "/S", "DENIED MOST", "RULE", "/S")
    table = _table(headings, text=(0, 1, 3, 4))
    shown = [(each or ())[:rows] for each in (frame.checked_most, frame.denied_most)]
    columns: list[Text] = [Text(heading) for heading in headings]
    lines = [[Text()] * len(headings) for _ in range(rows)]
    for first, keys in zip((0, 3), shown, strict=True):
        for line, key in zip(lines, keys, strict=False):
            rate = "" if key.per_second is None else _number(key.per_second)
            line[first : first + 3] = Text(_line(key.subject)), Text(_line(key.rule)), Text(rate)
    widths = [max(each.cell_len for each in column) for column in zip(columns, *lines, strict=True)]
    subject, rule = _fitting(widths, width)
    for line in lines:
        for place, most in ((0, subject), (1, rule), (3, subject), (4, rule)):
            line[place].truncate(most, overflow="ellipsis")
        table.add_row(*line)
    return table


def _fitting(widths: Sequence[int], width: int | None) -> tuple[int, int]:
    """How wide a subject and a rule may be, so that rates, the last to go, are seen."""
    if width is None:
        return _KEY_CHARACTERS_MAX, _KEY_CHARACTERS_MAX
    gaps = 2 * (len(widths) - 1)
    each = (width - gaps - widths[2] - widths[5]) // 2
    rule = min(max(widths[1], widths[4]), max(each // 3, _KEY_CHARACTERS_MIN))
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


def _latency(latency: Latency) -> str:
    if latency.p50_s is None or latency.p99_s is None:
        return "- (nothing to measure)"
    return f"p50 {_time(latency.p50_s)}, p99 {_time(latency.p99_s)}"


def _time(seconds: float) -> str:
    """To three digits, in the unit that people say.

    >>> _time(0.00004), _time(0.0123), _time(2.5), _time(7200)
    ('40 µs', '12.3 ms', '2.5 s', '2 h')
    """
    for unit, size in (("h", 3_600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _line(text: str, characters_max: int = 200) -> str:
    """A stranger's words: short, and nothing that a terminal obeys."""
    shown = "".join(each if each.isprintable() else " " for each in text)
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"
