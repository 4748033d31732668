"""Random numbers that are not drawn from the generator of the `random` module.

A program that seeds that generator expects the same numbers in every run, whatever our threads and
checks draw. Processes that were forked draw different numbers.
"""

from __future__ import annotations

from random import Random
from typing import Final

from ratekeeper.core.forks import after_fork

RANDOM: Final = Random()  # noqa: S311 - it spreads retries and load, and protects no secret
after_fork(RANDOM.seed)
