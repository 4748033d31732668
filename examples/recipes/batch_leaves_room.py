"""Run a large batch as fast as possible, and leave room for people who wait for an answer.

Both share a limit of the database. The batch has a second, lower limit: it can never take the part
that is meant for people. It waits for its turn (`wait`), they do not (`check`). The rule counts by
`class`, because for each distinct `by` only the first rule that matches applies.

The class comes from the program, not from the client: a header "interactive" would be sent by all.

The trap is to let the batch wait for the shared limit. It takes each unit at the moment when it
becomes free, and a person finds a unit only by luck.
"""

from __future__ import annotations

from collections.abc import Callable

from ratekeeper import Decision, Limiter, Request
from ratekeeper.testing import ManualClock

RULES = """
version: 1
rules:
  - {id: batch, match: {attributes: {class: batch}}, by: class, limits: 60/second capacity 1}
  - {id: database, by: [], limits: 100/second capacity 10}
"""
JOBS = 600
BATCH = Request(attributes={"class": "batch"})
PERSON = Request(user="ann", attributes={"class": "interactive"})


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
    limiter = Limiter.from_rules(RULES, clock=clock)
    seconds, admitted, sent = run(clock, lambda: limiter.wait(BATCH), lambda: limiter.check(PERSON))
    print(f"the batch takes {seconds:.1f} s; {admitted} of {sent} requests are admitted")
    assert admitted == sent
    assert abs(seconds - JOBS / 60) < 0.1

    shared = Limiter("100/second capacity 10", clock=clock)
    seconds, admitted, sent = run(
        clock, lambda: shared.wait("database"), lambda: shared.check("database")
    )
    print(f"with one limit: {seconds:.1f} s, {admitted} of {sent}")
    assert admitted < sent / 4


if __name__ == "__main__":
    main()
