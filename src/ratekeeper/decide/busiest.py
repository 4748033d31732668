"""The busiest subjects, in bounded memory and at almost no cost.

On average one check in SAMPLE_EVERY is sampled, at random so that no pattern of requests escapes.
The samples go into a space-saving sketch of BUSIEST_MAX names: a new name replaces the one with the
fewest samples and inherits its count. So every subject with clearly more than 1 / BUSIEST_MAX of
all checks is in the sketch. Counts are halved regularly, so that the sketch shows recent traffic.
The kernel keeps the same sketch across processes (`kernel/busiest.c`).
"""

from __future__ import annotations

from random import Random
from typing import Final

SAMPLE_EVERY: Final = 64
BUSIEST_MAX: Final = 128
HALVE_EVERY: Final = 16_384  # samples: a million checks


class Busiest:
    """The sketch. The store's lock protects it."""

    __slots__ = ("_noted", "_random", "_samples", "next_in")

    def __init__(self) -> None:
        self._random = Random()  # noqa: S311 - it chooses samples, not secrets
        self.next_in = self._gap()
        """Checks until the next sample. A caller may count it down and call `sample` itself."""
        self._noted = 0
        self._samples: dict[str, int] = {}

    def _gap(self) -> int:
        return self._random.randrange(1, 2 * SAMPLE_EVERY)

    def note(self, subject: str) -> None:
        """Count a check; sample it if it is due."""
        self.next_in -= 1
        if self.next_in <= 0:
            self.sample(subject)

    def sample(self, subject: str) -> None:
        """Note the subject of a check, and choose the next check to sample."""
        self.next_in = self._gap()
        self.add(subject)

    def add(self, subject: str) -> None:
        """Note the subject of a check that the caller has sampled."""
        samples = self._samples
        if subject not in samples and len(samples) == BUSIEST_MAX:
            fewest = min(samples, key=samples.__getitem__)
            samples[subject] = samples.pop(fewest)
        samples[subject] = samples.get(subject, 0) + 1
        self._noted += 1
        if self._noted % HALVE_EVERY == 0:
            self._samples = {name: count // 2 for name, count in samples.items() if count > 1}

    def top(self, count: int) -> list[tuple[str, int]]:
        """Return up to `count` subjects with their approximate number of checks, most first."""
        return [(subject, samples * SAMPLE_EVERY) for subject, samples in self.samples(count)]

    def samples(self, count: int) -> list[tuple[str, int]]:
        """Return up to `count` subjects with their samples, most first."""
        ranked = sorted(self._samples.items(), key=lambda item: -item[1])
        return ranked[: max(count, 0)]
