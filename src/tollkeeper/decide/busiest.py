"""Which subjects are checked most, in bounded memory and at next to no cost.

One check in SAMPLE_EVERY, on average and at random so that no rhythm of requests hides anyone, is
noted in a space-saving sketch of BUSIEST_MAX names: a new name takes the place of the one with the
fewest samples and inherits its count, so whoever makes clearly more than 1 / BUSIEST_MAX of all
checks is in it. Counts are halved now and then, so that it tells of lately and not of ever.
The kernel keeps the same sketch (`kernel/busiest.c`), across processes.
"""

from __future__ import annotations

from random import Random
from typing import Final

SAMPLE_EVERY: Final = 64
BUSIEST_MAX: Final = 128
HALVE_EVERY: Final = 16_384  # samples: a million checks


class Busiest:
    """The sketch. Not locked: its store's lock covers it."""

    __slots__ = ("_next_in", "_noted", "_random", "_samples")

    def __init__(self) -> None:
        self._random = Random()  # noqa: S311 - it chooses samples, not secrets
        self._next_in = self._gap()
        self._noted = 0
        self._samples: dict[str, int] = {}

    def _gap(self) -> int:
        return self._random.randrange(1, 2 * SAMPLE_EVERY)

    def note(self, subject: str) -> None:
        """Count a check; every so often, remember whose it was."""
        self._next_in -= 1
        if self._next_in == 0:
            self._next_in = self._gap()
            self._remember(subject)

    def _remember(self, subject: str) -> None:
        samples = self._samples
        if subject not in samples and len(samples) == BUSIEST_MAX:
            fewest = min(samples, key=samples.__getitem__)
            samples[subject] = samples.pop(fewest)
        samples[subject] = samples.get(subject, 0) + 1
        self._noted += 1
        if self._noted % HALVE_EVERY == 0:
            self._samples = {name: count // 2 for name, count in samples.items() if count > 1}

    def top(self, count: int) -> list[tuple[str, int]]:
        """Up to `count` subjects and about how many checks each had, most first."""
        ranked = sorted(self._samples.items(), key=lambda item: -item[1])
        return [(subject, samples * SAMPLE_EVERY) for subject, samples in ranked[: max(count, 0)]]
