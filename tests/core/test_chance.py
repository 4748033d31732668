"""Random numbers of our own: the generator of the program stays as it is."""

from __future__ import annotations

import os
import random

from ratekeeper import Limiter, Request
from ratekeeper.core.chance import RANDOM


def test_a_check_draws_no_number_of_the_program() -> None:
    """A program that seeds the `random` module gets the same numbers with and without a limiter."""
    rules = "{version: 1, rules: [{id: hot, by: user, limits: 100/minute, split: 4}]}"
    with Limiter.from_rules(rules) as limiter:
        before = random.getstate()
        assert limiter.check(Request(user="ann"))
        assert random.getstate() == before


def test_a_forked_process_draws_other_numbers() -> None:
    """Workers that were forked from one process would retry all at the same time."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(RANDOM.random()).encode())
        os._exit(0)
    os.wait()
    assert os.read(read, 100).decode() != str(RANDOM.random())
    os.close(read)
    os.close(write)
