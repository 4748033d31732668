"""Traffic for simulations: groups of users, or a recording, read from a CSV file.

A file of groups has one line for each group of users that behave alike:

    group,users,per_minute,cost,burst,from,until
    light,250,50
    heavy,40,900
    abusers,10,5000
    nightly,1,6000,10,50,30,40

| column | meaning |
|---|---|
| `group` | a name; the subjects are `light:0` to `light:249` |
| `users` | how many subjects the group has |
| `per_minute` | requests of each user, at random times |
| `cost` | units of each request; 1 if it is left out |
| `burst` | requests that arrive together, each on another node; 1 if it is left out |
| `from`, `until` | seconds of the simulation in which the group is active; all if left out |

A recording has one line for each request, in seconds from its beginning:

    time,subject,cost
    0.002,user:42,1
    0.004,user:7,5

The load balancer is random: each request reaches any live node.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from random import Random
from typing import Final, NoReturn

from ratekeeper.core.clock import NS_PER_SECOND, ns_from_seconds
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import UNITS_MAX
from ratekeeper.lab.network import START_NS, EventLoop

USERS_MAX: Final = 1_000_000
BYTES_MAX: Final = 100_000_000
_GROUP_COLUMNS: Final = ("group", "users", "per_minute", "cost", "burst", "from", "until")
_RECORD_COLUMNS: Final = ("time", "subject", "cost")
_SECONDS_PER_MINUTE: Final = 60

# Called with the subject and the cost of a request that arrives now.
Arrived = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class TrafficGroup:
    """Users that behave alike."""

    name: str
    users: int
    per_minute: float
    cost: int = 1
    burst: int = 1
    from_s: float = 0.0
    until_s: float = inf

    def start(self, loop: EventLoop, random: Random, arrived: Arrived) -> None:
        """Schedule the requests of all users at random times."""
        mean_ns = _SECONDS_PER_MINUTE * NS_PER_SECOND * self.burst / self.per_minute
        until_ns = START_NS + ns_from_seconds(self.until_s) if isfinite(self.until_s) else None

        def request(subject: str) -> None:
            if until_ns is not None and loop.now >= until_ns:
                return
            for _ in range(self.burst):
                arrived(subject, self.cost)
            loop.after(int(random.expovariate(1.0) * mean_ns), request, subject)

        from_ns = START_NS + ns_from_seconds(self.from_s)
        for number in range(self.users):
            first_ns = from_ns + int(random.expovariate(1.0) * mean_ns)
            loop.at(first_ns, request, f"{self.name}:{number}")


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests at given times: nanoseconds from the beginning, subject and cost."""

    requests: tuple[tuple[int, str, int], ...]

    def start(self, loop: EventLoop, random: Random, arrived: Arrived) -> None:  # noqa: ARG002 - groups need it
        """Schedule the requests at their recorded times."""
        requests = iter(self.requests)

        def request(subject: str, cost: int) -> None:
            arrived(subject, cost)
            schedule()

        def schedule() -> None:
            found = next(requests, None)
            if found is not None:
                loop.at(START_NS + found[0], request, *found[1:])

        schedule()


Traffic = Sequence[TrafficGroup | Recording]

# The mix for which the design was measured: most users are light, a few abuse the service.
USUAL_MIX: Final[Traffic] = (
    TrafficGroup("light", 250, 50),
    TrafficGroup("heavy", 40, 900),
    TrafficGroup("abusers", 10, 5_000),
)


def read_traffic(path: Path) -> Traffic:
    """Return the traffic in a CSV file. Raises ConfigError, which names the line."""
    try:
        if path.stat().st_size > BYTES_MAX:
            raise ConfigError(f"{path}: a file of traffic has at most {BYTES_MAX:,} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the traffic cannot be read: {error}") from None
    return parse_traffic(text, str(path))


def parse_traffic(text: str, source: str = "<text>") -> Traffic:
    """Return the traffic in a CSV text.

    >>> parse_traffic("group,users,per_minute\\nlight,250,50")[0].per_minute
    50.0
    """
    reader = csv.reader(text.splitlines(), strict=True, skipinitialspace=True)
    try:
        rows = [(reader.line_num, row) for row in reader if row and not row[0].startswith("#")]
    except csv.Error as error:
        raise ConfigError(f"{source}:{reader.line_num}: not a line of CSV: {error}") from None
    if not rows:
        raise ConfigError(f"{source}: no traffic; the first line is {','.join(_GROUP_COLUMNS[:3])}")
    (line, heading), *rest = rows
    names = tuple(name.strip() for name in heading)
    for columns, required in ((_GROUP_COLUMNS, 3), (_RECORD_COLUMNS, 2)):
        if names[:required] == columns[:required] and set(names) <= set(columns):
            break
    else:
        raise ConfigError(
            f"{source}:{line}: the columns are {','.join(names)}; they must be "
            f"{','.join(_GROUP_COLUMNS)} for groups of users (from `cost` on they are optional), "
            f"or {','.join(_RECORD_COLUMNS)} for a recording"
        )
    if not rest:
        raise ConfigError(f"{source}: no line follows the heading; add one, such as light,250,50")
    found = [_Row(f"{source}:{line}", names, row) for line, row in rest]
    if columns is _GROUP_COLUMNS:
        return _groups(found)
    requests = sorted((row.request() for row in found), key=lambda each: each[0])
    return (Recording(tuple(requests)),)


def _groups(rows: Sequence[_Row]) -> tuple[TrafficGroup, ...]:
    groups: dict[str, TrafficGroup] = {}
    for row in rows:
        group = row.group()
        if group.name in groups:
            row.fail("group", "is given twice; each group needs its own name")
        groups[group.name] = group
    return tuple(groups.values())


class _Row:
    """One line of the file."""

    def __init__(self, place: str, names: Sequence[str], cells: Sequence[str]) -> None:
        if len(cells) > len(names):
            raise ConfigError(
                f"{place}: {len(cells)} values for the {len(names)} columns {','.join(names)}"
            )
        self._place = place
        self._cells = {
            name: cell.strip() for name, cell in zip(names, cells, strict=False) if cell.strip()
        }

    def group(self) -> TrafficGroup:
        """Return the line as a group of users."""
        from_s = self._number("from", 0.0, 0.0, inf, "a number of seconds, for example 30")
        return TrafficGroup(
            name=self._text("group", "a name, for example light"),
            users=self._whole("users", None, USERS_MAX),
            per_minute=self._number(
                "per_minute", None, 1e-6, 1e9, "a number above 0, for example 50"
            ),
            cost=self._whole("cost", 1, UNITS_MAX),
            burst=self._whole("burst", 1, 100_000),
            from_s=from_s,
            until_s=self._number(
                "until", inf, from_s, inf, "a number of seconds after `from`, for example 40"
            ),
        )

    def request(self) -> tuple[int, str, int]:
        """Return the line as one request."""
        time_s = self._number("time", None, 0.0, 1e9, "seconds from the beginning, such as 0.25")
        subject = self._text("subject", "a subject, for example user:42")
        return ns_from_seconds(time_s), subject, self._whole("cost", 1, UNITS_MAX)

    def fail(self, name: str, problem: str) -> NoReturn:
        """Report a wrong value."""
        raise ConfigError(f"{self._place}: {name}={show(self._cells.get(name, ''))} {problem}")

    def _text(self, name: str, example: str) -> str:
        if name not in self._cells:
            self.fail(name, f"is missing: {example}")
        return self._cells[name]

    def _whole(self, name: str, default: int | None, most: int) -> int:
        cell = self._cells.get(name)
        if cell is None and default is not None:
            return default
        digits = cell is not None and cell.isascii() and cell.isdigit() and len(cell) <= 12
        if cell is None or not digits or not 1 <= int(cell) <= most:
            self.fail(name, f"is not a whole number from 1 to {most:,}")
        return int(cell)

    def _number(
        self, name: str, default: float | None, low: float, high: float, example: str
    ) -> float:
        cell = self._cells.get(name)
        if cell is None and default is not None:
            return default
        try:
            number = float(cell or "")
        except ValueError:
            number = inf
        if not isfinite(number) or not low <= number <= high:
            self.fail(name, f"is not {example}")
        return number
