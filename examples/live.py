"""Simulated clients against one limiter, live in the terminal: `make run`.

Four clients share a limiter, and each has its own quota. For each client, the table shows the
requests that it sent, those that were admitted, and the units that remain (by `peek`, which spends
nothing). The summary compares each client's admissions with the maximum that the limits allow in
the elapsed time: the greedy client, which ignores Retry-After, gets no more than the polite one.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ratekeeper import ConfigError, Decision, Limit, Limiter, parse_limits
from ratekeeper.core.clock import NS_PER_SECOND, SystemClock
from ratekeeper.core.model import ALGORITHM_NAMES, BUCKETS

BUCKET_LIMITS = "5/second burst 10; 60/minute"
WINDOW_LIMITS = "5/second; 60/minute"
FRAMES_PER_SECOND = 10
LAST_DECISIONS = 16
BAR_CELLS = 10
PROBE_CHECKS = 100
WIDE_COLUMNS = 124

# A client is a generator: it yields the pause before its next request, in seconds, and receives the
# decision about that request.
Behaviour = Generator[float, Decision, None]


def steady(rng: random.Random) -> Behaviour:
    while True:
        yield rng.uniform(0.30, 0.36)


def bursty(rng: random.Random) -> Behaviour:
    while True:
        yield rng.uniform(3.5, 4.5)
        for _ in range(19):
            yield 0.005


def greedy(rng: random.Random) -> Behaviour:
    while True:
        yield rng.uniform(0.02, 0.03)


def polite(rng: random.Random) -> Behaviour:
    pause = 0.0
    while True:
        decision = yield pause
        pause = decision.retry_after if not decision else rng.uniform(0.04, 0.06)


CLIENTS: tuple[tuple[str, str, Callable[[random.Random], Behaviour]], ...] = (
    ("steady", "3 requests a second", steady),
    ("bursty", "20 at once, then a pause", bursty),
    ("greedy", "40 a second, never waits", greedy),
    ("polite", "waits for Retry-After", polite),
)


@dataclass
class Client:
    name: str
    habit: str
    behaviour: Behaviour
    sent: int = 0
    allowed: int = 0
    last: deque[bool] = field(default_factory=lambda: deque(maxlen=LAST_DECISIONS))

    @property
    def denied(self) -> int:
        return self.sent - self.allowed


class Traffic:
    """The clients, and the order in which they send."""

    def __init__(self, limiter: Limiter, seed: int) -> None:
        self.limiter = limiter
        self.clients = []
        # The limiter reads the same clock, so windows begin and end at the same times.
        self._clock = SystemClock()
        self.started_ns = self._clock.now_ns()
        self.ended_ns: int | None = None
        self.check_ns: list[float] = []
        self._probe = Limiter(limiter.limits)
        self._due: list[tuple[float, int]] = []
        for number, (name, habit, behave) in enumerate(CLIENTS):
            behaviour = behave(random.Random(f"{seed} {name}"))
            self.clients.append(Client(name, habit, behaviour))
            heapq.heappush(self._due, (next(behaviour), number))

    @property
    def elapsed(self) -> float:
        until_ns = self._clock.now_ns() if self.ended_ns is None else self.ended_ns
        return (until_ns - self.started_ns) / NS_PER_SECOND

    def end(self) -> None:
        self.ended_ns = self._clock.now_ns()

    def run_until(self, until: float) -> None:
        """Send the due requests, and sleep in between, until `until` seconds after the start."""
        while self._due[0][0] < until:
            due, number = heapq.heappop(self._due)
            time.sleep(max(0.0, due - self.elapsed))
            pause = self._send(self.clients[number])
            heapq.heappush(self._due, (max(due, self.elapsed) + pause, number))
        time.sleep(max(0.0, until - self.elapsed))

    def _send(self, client: Client) -> float:
        decision = self.limiter.check(client.name)
        client.sent += 1
        client.allowed += bool(decision)
        client.last.append(bool(decision))
        return client.behaviour.send(decision)

    def probe(self) -> None:
        """Time checks in a loop, with the same limits but on a limiter without clients.

        A timing of the clients' checks would mostly measure how long a processor takes to wake up
        from the sleep before each check.
        """
        self._probe.reset("probe")
        for timed in (False, True):
            start_ns = time.perf_counter_ns()
            for _ in range(PROBE_CHECKS):
                self._probe.check("probe")
            if timed:
                self.check_ns.append((time.perf_counter_ns() - start_ns) / PROBE_CHECKS)


def rate_of(limit: Limit) -> str:
    units = {1: "s", 60: "min", 3_600: "h", 86_400: "day"}
    return f"{limit.limit}/{units.get(limit.per, f'{limit.per:g}s')}"


def bound_of(limit: Limit, start_ns: int, end_ns: int) -> int:
    """Return the most requests that one limit admits between two times."""
    window_ns = limit.window_ns
    if limit.algorithm in BUCKETS:
        return limit.capacity + (end_ns - start_ns) * limit.limit // window_ns
    if limit.algorithm == "sliding_window_log":
        return limit.limit * ((end_ns - start_ns) // window_ns + 1)
    windows_touched = end_ns // window_ns - start_ns // window_ns + 1
    return limit.limit * windows_touched


# ---------------------------------------------------------------------------- output


class Look:
    """The colours and shapes that the terminal supports."""

    def __init__(self, colours: bool, shapes: bool) -> None:
        self._colours = colours
        self.full, self.empty = ("█", "░") if shapes else ("#", ".")
        self.yes, self.no = ("●", "×") if shapes else ("+", "x")
        self.line = "─" if shapes else "-"

    def paint(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colours else text

    def green(self, text: str) -> str:
        return self.paint(text, "32")

    def red(self, text: str) -> str:
        return self.paint(text, "31")

    def dim(self, text: str) -> str:
        return self.paint(text, "2")

    def bold(self, text: str) -> str:
        return self.paint(text, "1")

    def bar(self, part: int, whole: int) -> str:
        # Rounded up: a bar is empty only if no units remain.
        cells = min(BAR_CELLS, -(-part * BAR_CELLS // whole))
        colour = "32" if 2 * part > whole else "33" if part else "31"
        empty = self.dim(self.empty * (BAR_CELLS - cells))
        return self.paint(self.full * cells, colour) + empty


def rows_of(traffic: Traffic, look: Look, wide: bool) -> Iterator[str]:
    """Return a line for each client. Pad before painting: colour codes have no width."""
    for client in traffic.clients:
        now = traffic.limiter.peek(client.name)
        retry = f"{now.retry_after:7.3f} s" if not now else "      now"
        marks = "".join(look.green(look.yes) if ok else look.red(look.no) for ok in client.last)
        yield "  ".join(
            (
                look.bold(f"{client.name:7}"),
                *([look.dim(f"{client.habit:27}")] if wide else []),
                f"{client.sent:5}",
                look.green(f"{client.allowed:7}"),
                (look.red if client.denied else look.dim)(f"{client.denied:6}"),
                look.bar(now.remaining, now.limit),
                f"{now.remaining:3} of {now.limit:<3}",
                look.dim(f"{rate_of(now.policy):>6}"),
                (look.dim if now else look.red)(f"{retry:>9}"),
                marks,
            )
        )


def totals_of(traffic: Traffic) -> str:
    sent = sum(client.sent for client in traffic.clients)
    allowed = sum(client.allowed for client in traffic.clients)
    rate = sent / max(traffic.elapsed, 1e-9)
    cost_ns = statistics.median(traffic.check_ns) if traffic.check_ns else 0
    return (
        f"{sent} checks: {allowed} allowed, {sent - allowed} denied   {rate:.0f} checks/s   "
        f"median {cost_ns:,.0f} ns a check"
    )


def frame_of(traffic: Traffic, look: Look, seconds: float) -> list[str]:
    held = [f"{rate_of(limit)} up to {limit.capacity}" for limit in traffic.limiter.limits]
    algorithm = traffic.limiter.limits[0].algorithm
    wide = shutil.get_terminal_size().columns >= WIDE_COLUMNS
    heading = (f"{'client':7}  {'behaviour':27}  " if wide else f"{'client':7}  ") + (
        f"{'sent':>5}  {'allowed':>7}  {'denied':>6}  {'remaining':22}  {'limit':>6}  "
        f"{'retry':>9}  {f'last {LAST_DECISIONS}':{LAST_DECISIONS}}"
    )
    return [
        f"{look.bold('ratekeeper')}  {algorithm}: {', and '.join(held)}",
        "",
        look.dim(heading),
        look.dim(look.line * len(heading)),
        *rows_of(traffic, look, wide),
        look.dim(look.line * len(heading)),
        totals_of(traffic),
        look.dim(f"{min(traffic.elapsed, seconds):4.1f} of {seconds:g} s; Ctrl-C ends it"),
    ]


@contextmanager
def screen() -> Iterator[Callable[[list[str]], None]]:
    """Redraw in place: one write replaces the previous frame, so the screen does not flicker."""
    drawn = 0

    def draw(lines: list[str]) -> None:
        nonlocal drawn
        up = f"\033[{drawn}A" if drawn else ""
        # Long lines are cut: a wrapped line would put the cursor one line too low.
        body = "".join(f"\033[2K{line}\r\n" for line in lines)
        sys.stdout.write(f"\033[?7l{up}{body}\033[?7h")
        sys.stdout.flush()
        drawn = len(lines)

    sys.stdout.write("\033[?25l")
    try:
        yield draw
    finally:
        sys.stdout.write("\033[?25h")
        sys.stdout.flush()


def run_on_terminal(traffic: Traffic, look: Look, seconds: float) -> None:
    with screen() as draw:
        with suppress(KeyboardInterrupt):
            frames = int(seconds * FRAMES_PER_SECOND)
            for frame in range(1, frames + 1):
                traffic.probe()
                draw(frame_of(traffic, look, seconds))
                traffic.run_until(frame / FRAMES_PER_SECOND)
            traffic.run_until(seconds)
        traffic.end()
        draw(frame_of(traffic, look, seconds))


def run_in_lines(traffic: Traffic, seconds: float) -> None:
    with suppress(KeyboardInterrupt):
        until = 0.0
        while until < seconds:
            until = min(until + 1, seconds)
            traffic.probe()
            traffic.run_until(until)
            for client in traffic.clients:
                now = traffic.limiter.peek(client.name)
                print(
                    f"{until:5.1f} s  {client.name:7} sent {client.sent:4}  "
                    f"allowed {client.allowed:4}  denied {client.denied:4}  "
                    f"remaining {now.remaining:3} of {now.limit:<3}  retry {now.retry_after:.3f} s"
                )
            print(f"{until:5.1f} s  {totals_of(traffic)}", flush=True)
    traffic.end()


def summarise(traffic: Traffic) -> bool:
    """Print the admitted requests and the maximum; return True if no client exceeded it."""
    start_ns, end_ns = traffic.started_ns, traffic.ended_ns or traffic.started_ns
    bound = min(bound_of(limit, start_ns, end_ns) for limit in traffic.limiter.limits)
    print(
        f"\nIn {traffic.elapsed:.1f} s these limits admit at most {bound} requests of each client:"
    )
    for client in traffic.clients:
        verdict = "within" if client.allowed <= bound else "OVER"
        print(f"  {client.name:7} sent {client.sent:5}, admitted {client.allowed:4}: {verdict}")
    return all(client.allowed <= bound for client in traffic.clients)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Limit simulated traffic and show the decisions live.",
        epilog="In a terminal, the table is redrawn. Elsewhere, each client gets one line per "
        "second. NO_COLOR is respected. Exit status 1 means that a bound was exceeded.",
    )
    parser.add_argument(
        "--seconds", type=float, default=20, help="how long to run (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the clients' timing (default: %(default)s)"
    )
    parser.add_argument(
        "--algorithm",
        choices=ALGORITHM_NAMES,
        default="token_bucket",
        help="algorithm of all limits (default: %(default)s)",
    )
    parser.add_argument(
        "--limits",
        metavar="RATES",
        help=f'a rate string (default: "{BUCKET_LIMITS}"; '
        f'"{WINDOW_LIMITS}" for algorithms that have no burst)',
    )
    chosen = parser.parse_args()
    if not 0 < chosen.seconds <= 3_600:
        parser.error(f"--seconds {chosen.seconds:g} is not between 0 and 3600")
    default = BUCKET_LIMITS if chosen.algorithm in BUCKETS else WINDOW_LIMITS
    try:
        chosen.limits = parse_limits(chosen.limits or default, algorithm=chosen.algorithm)
    except ConfigError as error:
        parser.error(str(error))
    return chosen


def main() -> int:
    chosen = options()
    # A shell makes a background process ignore Ctrl-C; this program restores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    traffic = Traffic(Limiter(chosen.limits), chosen.seed)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        shapes = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        look = Look(colours="NO_COLOR" not in os.environ, shapes=shapes)
        run_on_terminal(traffic, look, chosen.seconds)
    else:
        run_in_lines(traffic, chosen.seconds)
    return 0 if summarise(traffic) else 1


if __name__ == "__main__":
    sys.exit(main())
