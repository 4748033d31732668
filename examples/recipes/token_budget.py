"""Give users and organisations a budget of language model tokens and of requests.

The tokens of a call are known only when it ends. So reserve an estimate, and report what is used:
the reservation is settled at the end, also when the stream breaks, because the tokens that were
generated cost money.

The trap: "look whether there is budget, call the model, then charge" admits any number of
concurrent calls, because each of them sees the same budget. A reservation is charged first.

All four limits decide together. A call that one of them denies costs nothing in the others.
"""

from __future__ import annotations

from collections.abc import Generator

from ratekeeper import Limiter, LimitExceeded, Request

limiter = Limiter.from_rules(
    """
version: 1
rules:
  - {id: user-tokens, by: user, unit: tokens, limits: 2000/day}
  - {id: org-tokens, by: tenant, unit: tokens, limits: 3000/day}
  - {id: user-requests, by: user, limits: 10/day}
  - {id: org-requests, by: tenant, limits: 100/day}
""",
    on_failure="closed",  # tokens cost money, so none are spent while the store is away
)


def complete(
    user: str, organisation: str, prompt: str, output_max: int
) -> Generator[str, None, None]:
    """Stream an answer. The estimate is the worst case: the prompt and the longest output."""
    prompt_tokens = len(prompt.split())
    estimate = {"requests": 1, "tokens": prompt_tokens + output_max}
    with limiter.reserve(Request(user=user, tenant=organisation), costs=estimate) as reservation:
        reservation.use(prompt_tokens)  # also of a call that breaks before its first word
        for word in ["spam"] * 60:  # the model is here
            reservation.use(1)
            yield word


def left(user: str) -> dict[str, int]:
    """Return what remains, by rule."""
    rules = limiter.explain(Request(user=user, tenant="acme")).applying
    return {each.id: each.decision.remaining for each in rules if each.decision is not None}


def main() -> None:
    # An answer that ends: 1,002 tokens are reserved, 62 are charged.
    stream = complete("ann", "acme", "hello model", output_max=1000)
    next(stream)
    assert left("ann")["user-tokens"] == 2000 - 1002
    assert len(list(stream)) == 59
    assert left("ann")["user-tokens"] == 2000 - 62

    # A client that goes away after three words pays for these.
    stream = complete("bob", "acme", "hello model", output_max=1000)
    print("bob reads", next(stream), next(stream), next(stream), "and closes the connection")
    stream.close()
    assert left("bob")["user-tokens"] == 2000 - 5

    # Of two calls at once, the second does not get the budget that the first has reserved.
    stream = complete("ann", "acme", "hello model", output_max=1000)
    next(stream)
    try:
        next(complete("ann", "acme", "hello model", output_max=1000))
    except LimitExceeded as denied:
        print(f"ann's second call is denied by {denied.decision.rule}")
    assert left("ann")["user-requests"] == 10 - 2  # the denied call is not counted
    # All users of the organisation share its budget.
    assert left("eve")["org-tokens"] == 3000 - 62 - 5 - 1002


if __name__ == "__main__":
    main()
