"""What a running service tells at /metrics, read for the command line.

The text is Prometheus': a name, labels in braces and a number on each line. Read here in a few
lines, because those who only ask a service have no Prometheus library. What cannot be read is left
out: the text comes from another program, perhaps of another version.

Counters only go up while a service runs. One that is lower than before has begun anew, with the
service, and what it counts now has all come since.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from tollkeeper.cli.remote_service import Service, Unanswered

# More lines than a service with a thousand rules has.
LINES_MAX: Final = 100_000

_LINE: Final = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL: Final = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")

Labels = frozenset[tuple[str, str]]
# By upper bound in seconds: how many took at most so long. The last bound is infinite.
Buckets = dict[float, float]


class Watched(Service):
    """A running service, whose metrics are read too."""

    def scrape(self) -> str:
        """What /metrics says. Raises Unanswered."""
        until_s = monotonic() + self._timeout_s
        try:
            with self._client.stream(
                "GET", f"{self.url}/metrics", headers={"accept": "text/plain"}
            ) as response:
                text = self._read(response, until_s)
        except self._http.TimeoutException:
            raise self._too_slow() from None
        except self._http.HTTPError as error:
            raise self._unreachable(error) from None
        if not response.is_success or b"tollkeeper_" not in text:
            raise Unanswered(self._complaint(response, None), response.status_code)
        return text.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The numbers of one scrape, by name and labels."""

    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """The sum of those that have these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(
            value for has, value in self.values.get(name, {}).items() if wanted <= dict(has).items()
        )

    def value(self, name: str) -> float | None:
        """Of a metric without labels; None where it is not told."""
        return self.values.get(name, {}).get(frozenset())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the values of one label, of those that have the others."""
        found: dict[str, float] = {}
        wanted = labels.items()
        for each, value in self.values.get(name, {}).items():
            has = dict(each)
            if label in has and wanted <= has.items():
                found[has[label]] = found.get(has[label], 0.0) + value
        return found

    def buckets(self, name: str) -> Buckets:
        """Of a histogram, by upper bound."""
        found: Buckets = {}
        for text, count in self.by(f"{name}_bucket", "le").items():
            if (bound := _number(text)) is not None:
                found[bound] = count
        return dict(sorted(found.items()))


def read(text: str) -> Scrape:
    """What the text says.

    >>> read('checks{rule="a",outcome="denied"} 3').by("checks", "rule")
    {'a': 3.0}
    """
    values: dict[str, dict[Labels, float]] = {}
    for line in text.split("\n")[:LINES_MAX]:
        found = _LINE.match(line)
        number = _number(found["value"]) if found else None
        if found is None or number is None or math.isnan(number):
            continue
        labels = frozenset(
            (label["name"], _plain(label["value"]))
            for label in _LABEL.finditer(found["labels"] or "")
        )
        values.setdefault(found["name"], {})[labels] = number
    return Scrape(values)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


# ── Between two scrapes ────────────────────────────────────────────────────────────────────────


def grown(before: float, now: float) -> float:
    """By how much a counter went up; all of it, where it began anew."""
    return now - before if now >= before else now


def grown_buckets(before: Buckets, now: Buckets) -> Buckets:
    """What was counted in between."""
    began_anew = any(now.get(bound, 0.0) < count for bound, count in before.items())
    if began_anew:
        return now
    return {bound: count - before.get(bound, 0.0) for bound, count in now.items()}


def quantile_s(buckets: Buckets, share: float) -> float | None:
    """The time that so great a share took at most, as Prometheus estimates it; None: nobody knows.

    Within a range the times are taken to be spread evenly. Beyond the last bound it is that bound.

    >>> quantile_s({0.001: 50.0, 0.002: 100.0, math.inf: 100.0}, 0.75)
    0.0015
    """
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    wanted = share * total
    below_s, below = 0.0, 0.0
    for bound_s, count in buckets.items():
        if count >= wanted and count > below:
            if math.isinf(bound_s):
                return below_s
            return below_s + (bound_s - below_s) * (wanted - below) / (count - below)
        below_s, below = bound_s, count
    return None
