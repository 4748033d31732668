"""Limit the codes that are sent by SMS or e-mail, and the guesses at them.

Sending has three limits, one for each attack: by recipient (a victim is flooded with messages), by
address of the client (one client asks for many recipients) and by country (a fraud ring earns a
share of the price of each SMS to its own numbers, from thousands of addresses).

Guesses are limited by account. The trap is to limit them by code: an attacker then asks for another
code after every five guesses, and goes on for ever. Here a new code does not change the count of
guesses. A success resets it. Send a code only after the right password: a client that can ask for a
user's codes can also use up the user's guesses.
"""

from __future__ import annotations

import secrets

from ratekeeper import Decision, Limiter, Request
from ratekeeper.testing import ManualClock

clock = ManualClock()  # so that this program does not take a day; leave it out in real code
# `closed`: while the store is away nothing is sent, which would cost money, and nothing is guessed.
limiter = Limiter.from_rules(
    """
version: 1
rules:
  - id: recipient
    match: {attributes: {action: send}}
    by: recipient
    limits: 1/30s capacity 1; 5 in any day
  - {id: sender, match: {attributes: {action: send}}, by: ip, limits: 20/hour}
  - id: country
    match: {attributes: {action: send}}
    by: country
    limits: 100/hour
    keys: {"44": 1000/hour}
  - id: guesses
    match: {attributes: {action: guess}}
    by: user
    limits: 5 in any 15m; 20 in any day
""",
    clock=clock,
    on_failure="closed",
)
codes: dict[str, tuple[str, int]] = {}  # by user: the code, and when it expires
PHONES = {"ann": "+44 20 7946 0001", "eve": "+44 20 7946 0666"}


def send_code(user: str, ip: str) -> Decision:
    # A number has one key, however it is written. Use a library to find its country.
    number = "".join(filter(str.isdigit, PHONES[user]))
    what = {"action": "send", "recipient": number, "country": number[:2]}
    decision = limiter.check(Request(user=user, ip=ip, attributes=what))
    if decision:
        code = f"{secrets.randbelow(1_000_000):06}"  # send it here
        codes[user] = code, limiter.clock.now_ns() + 600 * 10**9  # ten minutes
    return decision


def is_right(user: str, guess: str) -> bool:
    """Return True once for the right code, and False for any guess over the limits."""
    request = Request(user=user, attributes={"action": "guess"})
    if not limiter.check(request):
        return False  # also for the right code: otherwise guessing would go on
    code, until_ns = codes.get(user, ("", 0))
    in_time = limiter.clock.now_ns() < until_ns
    if not in_time or not secrets.compare_digest(code.encode(), guess.encode()):
        return False
    del codes[user]
    limiter.reset(request)
    return True


def main() -> None:
    assert send_code("ann", "192.0.2.1")
    again = send_code("ann", "203.0.113.7")
    print(f"ann's phone gets the next code in {again.retry_after:.0f} s, for any client that asks")
    assert (again.rule, again.retry_after) == ("recipient", 30)
    assert not is_right("ann", "no code")
    assert is_right("ann", codes["ann"][0])
    assert limiter.peek(Request(user="ann", attributes={"action": "guess"})).remaining == 5
    assert not is_right("ann", ""), "a code works once"

    # Eve has five guesses, and asks for a new code. Her count has not changed.
    send_code("eve", "203.0.113.7")
    assert not any(is_right("eve", "no code") for _ in range(5))
    clock.advance(30)
    assert send_code("eve", "203.0.113.7")
    assert not is_right("eve", codes["eve"][0])
    print("eve's sixth guess is rejected, although it is right")

    # Thousands of addresses ask for expensive numbers, which belong to the attacker.
    for number in range(1000):
        PHONES[f"bot{number}"] = f"+99 {number:07}"
    sent = sum(bool(send_code(f"bot{n}", f"198.51.{n // 256}.{n % 256}")) for n in range(1000))
    print(f"{sent} of 1000 messages to an expensive country are sent")
    assert sent == 100


if __name__ == "__main__":
    main()
