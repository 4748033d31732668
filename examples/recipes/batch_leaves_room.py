"""Run a large batch as fast as possible, and leave room for people who wait for an answer.

Both share the limit of the database. The batch waits with `priority="batch"`: it never takes the
last fifth of the limit, which is left for people. They do not wait (`check`).

The class comes from the program, not from the client: a header "interactive" would be sent by all.

The trap is to let the batch wait like everything else. It takes each unit at the moment when it
becomes free, and a person finds a unit only by luck.
"""

from __future__ import annotations

from collections.abc import Callable

from ratekeeper import Decision, Limiter
from ratekeeper.testing import ManualClock

LIMIT = "100/second capacity 10"
JOBS = 600


def run(
    clock: ManualClock, take_turn: Callable[[], Decision], person: Callable[[], Decision]
) -> tuple[float, int, int]:
    """Do all jobs while a person sends 20 requests a second.

    Return the seconds, the requests that were admitted, and all of them.
    """
    started_ns = clock.now_ns()
    answers: list[bool] = []
    for _ in range(JOBS):
        take_turn()  # do a part of the batch here
        while started_ns + len(answers) * 50_000_000 < clock.now_ns():
            answers.append(bool(person()))
    return (clock.now_ns() - started_ns) / 1e9, sum(answers), len(answers)


def main() -> None:
    clock = ManualClock()  # leave it out in real code
    limiter = Limiter(LIMIT, clock=clock)
    seconds, admitted, sent = run(
        clock,
        lambda: limiter.wait("database", priority="batch"),
        lambda: limiter.check("database"),
    )
    print(f"the batch takes {seconds:.1f} s; {admitted} of {sent} requests are admitted")
    assert admitted == sent
    # It has all that people leave: 80 of 100 units a second.
    assert abs(seconds - JOBS / 80) < 0.2

    limiter = Limiter(LIMIT, clock=clock)
    seconds, admitted, sent = run(
        clock, lambda: limiter.wait("database"), lambda: limiter.check("database")
    )
    print(f"without the class: {seconds:.1f} s, {admitted} of {sent}")
    assert admitted < sent / 4


if __name__ == "__main__":
    main()
