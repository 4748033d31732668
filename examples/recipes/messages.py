"""Send each recipient at most three messages a day, and at most ten a second in all.

Both limits decide together: a message that one of them denies costs nothing in the other. The trap
is two limiters in a row. While the provider's rate is used up, every attempt would take one of the
recipient's three messages, and after three attempts without a message the day is over.

`wait` with a timeout treats the two denials as you would: it waits a moment for the rate, and
returns at once when the day's messages are used up. `decision.rule` says which limit it was.
"""

from __future__ import annotations

from ratekeeper import Decision, Limiter, Request
from ratekeeper.testing import ManualClock

clock = ManualClock()  # so that this program does not take a day; leave it out in real code
# `in any day` counts in every 24 hours, wherever they start. `3/day`, a token bucket, would return
# one message every 8 hours. `on_failure: closed`: while the store is away, send nothing.
limiter = Limiter.from_rules(
    """
version: 1
rules:
  - id: recipient
    by: recipient
    limits: 3 in any day
    on_failure: closed
  - {id: provider, by: [], limits: 10/second capacity 1}
""",
    clock=clock,
)


def send(recipient: str, text: str) -> Decision:
    # Addresses are equal however they are written, otherwise ANN@shop.test has a quota of her own.
    request = Request(attributes={"recipient": recipient.strip().casefold()})
    decision = limiter.wait(request, timeout=5)
    if decision:
        sent.append((recipient, text))  # call the provider here
    return decision


sent: list[tuple[str, str]] = []


def main() -> None:
    people = [f"user{number}@shop.test" for number in range(20)]
    assert all(send(person, "hello") for person in people)
    print(f"{len(sent)} messages in {clock.now_ns() / 1e9:.1f} s")
    assert clock.now_ns() >= 1_900_000_000  # the first at once, and then ten a second

    results = [send(address, "news") for address in ("ann@shop.test", "Ann@Shop.test ") * 2]
    assert [bool(result) for result in results] == [True, True, True, False]
    print(f"the fourth to ann: denied by {results[3].rule}, for {results[3].retry_after:.0f} s")
    assert results[3].rule == "recipient"
    clock.advance(results[3].retry_after)
    assert send("ann@shop.test", "news")

    # The trap: one limiter after the other, while the provider's rate is used up.
    recipients, provider = Limiter("3/day", clock=clock), Limiter("1/second", clock=clock)
    provider.check("provider")
    attempts = [recipients.check("bob") and provider.check("provider") for _ in range(3)]
    assert not any(attempts)
    assert recipients.peek("bob").remaining == 0
    print("two limiters in a row: bob has got no message, and has none left for today")


if __name__ == "__main__":
    main()
