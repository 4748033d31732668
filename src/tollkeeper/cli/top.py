"""`tollkeeper top`: a running service, live: rates, denials, hottest keys, breakers, latency.

Every interval the service is asked for its metrics, its readiness and those who come most, and a
frame is made of that and of what it said before; `top_view.py` does that, and says how it looks. On
a terminal the frame is written over the last one in one go, so nothing flickers, and again at once
when the window changes its size. In a pipe frames follow one another, as plain lines.

A service that stops answering leaves the last frame where it is, with a line that says why; it is
asked again every interval. Only a first answer that does not come ends the command.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from threading import Event
from time import monotonic, time
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live

from tollkeeper.cli.remote import TIMEOUT_S, CaOption, TimeoutOption, TokenOption, UrlOption
from tollkeeper.cli.remote_service import URL_DEFAULT, Unanswered
from tollkeeper.cli.rules_options import JsonOption
from tollkeeper.cli.rules_print import OK, say, say_json, telling
from tollkeeper.cli.scrape import Scrape, Watched, read
from tollkeeper.cli.top_view import KEYS_MAX, Frame, Sample, frame_of, view
from tollkeeper.core.errors import ConfigError

INTERVAL_S: Final = 2.0
# Workers leave their counts for each other once a second.
INTERVAL_S_MIN: Final = 1.0
INTERVAL_S_MAX: Final = 3_600.0
# Without a terminal lines are as long as they are; this is where words would be cut.
_PIPE_WIDTH: Final = 200


def top(
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="How often to look.")
    ] = INTERVAL_S,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, of one interval, and end.")
    ] = False,
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Watch a running service: what it allows and denies, who asks most, and how its store is.

    Ctrl-C ends it. Whom it names (the keys that are checked and denied most) a token with the role
    read or admin may see; the rest needs none.

    Exit code: 0 it was shown; 2 it could not be asked.

    Example: tollkeeper top

    Example: tollkeeper top --url https://limits.example.com --interval 5

    Example: tollkeeper top --once --json
    """
    with telling(as_json):
        if not INTERVAL_S_MIN <= interval <= INTERVAL_S_MAX:
            raise ConfigError(
                f"--interval {interval:g} is not between {INTERVAL_S_MIN:g} and "
                f"{INTERVAL_S_MAX:g} seconds; try {INTERVAL_S:g}"
            )
        with _ending(), Watched(url, token, timeout_s=timeout, ca_file=ca) as service:
            frames = _Frames(service, interval)
            if as_json or once:
                _say(frames.next(), as_json)
            elif (console := Console(highlight=False)).is_terminal:
                _watch(frames, console)
            else:
                _follow(frames)


class _Frames:
    """A service, looked at again and again."""

    def __init__(self, service: Watched, interval_s: float) -> None:
        self._service = service
        self.interval_s = interval_s
        self._last = self._sample()

    def age_s(self) -> float:
        """Since the last answer."""
        return monotonic() - self._last.at_s

    def first(self) -> Frame:
        """What happened since the service started, which is there to be shown at once."""
        started_s = self._last.metrics.value("tollkeeper_start_time_seconds")
        # By its clock and ours; if they differ much, so does the first frame.
        ran_s = self.interval_s if started_s is None else max(time() - started_s, self.interval_s)
        before = Sample(self._last.at_s - ran_s, Scrape())
        return frame_of(self._service.url, before, self._last)

    def next(self) -> Frame:
        """What happened since the last one, after the interval. Raises Unanswered."""
        wait(Event(), self._last.at_s + self.interval_s - monotonic())
        return self.now()

    def now(self) -> Frame:
        """What happened since the last one that was told. Raises Unanswered."""
        found = self._sample()
        before, self._last = self._last, found
        return frame_of(self._service.url, before, found)

    def _sample(self) -> Sample:
        metrics = read(self._service.scrape())
        # Now, not before: what the store holds may have been waited for, and then it is counted.
        at_s = monotonic()
        ready = self._service.ask("GET", "/readyz", expected="status")
        return replace(
            Sample(at_s, metrics, ready),
            checked_most=self._most("checks"),
            denied_most=self._most("denied"),
        )

    def _most(self, by: str) -> dict[str, Any] | None:
        """Who comes most; None where the service keeps no such list, or not for this token."""
        query = {"by": by, "limit": str(KEYS_MAX)}
        try:
            return self._service.ask("GET", "/v1/admin/top", query=query, expected="items")
        except Unanswered as error:
            if error.status in {401, 403, 404}:
                return None
            raise


def wait(woken: Event, seconds: float) -> bool:
    """Until somebody wakes us, or the time is over; was it somebody?"""
    return woken.wait(max(seconds, 0.0))


@contextmanager
def _ending() -> Iterator[None]:
    """Ctrl-C, or being told to end, is the usual end of this: no traceback, and exit code 0."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(OK) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(frames: _Frames, console: Console) -> None:
    """On a terminal, until Ctrl-C."""
    resized = Event()
    before = signal.signal(signal.SIGWINCH, lambda *_: resized.set())
    try:
        # No thread that draws by itself: there is something new when a frame is, or a size.
        with Live(console=console, screen=True, auto_refresh=False) as live:
            frame, note = frames.first(), "rates since the service started; soon, those of now"
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
                except Unanswered as error:
                    note = f"as it was {frames.age_s():.0f} s ago: {error}"
    finally:
        signal.signal(signal.SIGWINCH, before)


def _follow(frames: _Frames) -> None:
    """In a pipe, until whoever reads it has gone."""
    while True:
        try:
            _say(frames.next(), as_json=False)
            say("")
        except Unanswered as error:
            say(f"tollkeeper: {error}", to_stderr=True)
            wait(Event(), frames.interval_s)


def _say(frame: Frame, as_json: bool) -> None:
    if as_json:
        say_json({"exit_code": OK, **asdict(frame)})
        return
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(view(frame, height=console.height, width=console.width))
        return
    plain = Console(highlight=False, width=_PIPE_WIDTH, no_color=True)
    with plain.capture() as captured:
        plain.print(view(frame))
    lines = (line.rstrip() for line in captured.get().splitlines())
    say("\n".join(lines))
