"""Give users and organisations a budget of language model tokens and of requests.

The tokens of a call are known only when it ends. So reserve an estimate, and settle the
real number afterwards, also when the stream breaks: the tokens that were generated cost money.

The trap: "look whether there is budget, call the model, then charge" admits any number of
concurrent calls, because each of them sees the same budget. A reservation is charged first.

All four limits decide together. A call that one of them denies costs nothing in the others.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ratekeeper import Limiter, LimitExceeded, Request

# The attribute `unit` says what a check counts, so that tokens and requests have their own rules.
limiter = Limiter.from_rules(
    """
version: 1
rules:
  - {id: user-tokens, match: {attributes: {unit: tokens}}, by: user, limits: 2000/day}
  - {id: org-tokens, match: {attributes: {unit: tokens}}, by: tenant, limits: 3000/day}
  - {id: user-requests, match: {attributes: {unit: requests}}, by: user, limits: 10/day}
  - {id: org-requests, match: {attributes: {unit: requests}}, by: tenant, limits: 100/day}
""",
    on_failure="closed",  # tokens cost money, so none are spent while the store is away
)


@dataclass
class Usage:
    tokens: int = 0


@contextmanager
def budget(user: str, organisation: str, estimate: int) -> Iterator[Usage]:
    """Reserve `estimate` tokens and one request; charge the tokens in `Usage` at the end."""
    tokens = Request(user=user, tenant=organisation, attributes={"unit": "tokens"})
    requests = Request(user=user, tenant=organisation, attributes={"unit": "requests"})
    results = limiter.evaluate_all([(tokens, estimate), (requests, 1)])
    decisions = [result.decision for result in results]
    if not all(decisions):
        raise LimitExceeded(max(decisions, key=lambda decision: decision.retry_after))
    usage = Usage()
    try:
        yield usage
    finally:
        limiter.settle(tokens, estimate, usage.tokens, decisions[0])


def complete(
    user: str, organisation: str, prompt: str, output_max: int
) -> Generator[str, None, None]:
    """Stream an answer. The estimate is the worst case: the prompt and the longest output."""
    prompt_tokens = len(prompt.split())
    with budget(user, organisation, prompt_tokens + output_max) as usage:
        usage.tokens = prompt_tokens
        for word in ["spam"] * 60:  # the model is here
            usage.tokens += 1
            yield word


def left(user: str, unit: str = "tokens") -> int:
    return limiter.peek(Request(user=user, tenant="acme", attributes={"unit": unit})).remaining


def main() -> None:
    # An answer that ends: 1,002 tokens are reserved, 62 are charged.
    stream = complete("ann", "acme", "hello model", output_max=1000)
    next(stream)
    assert left("ann") == 2000 - 1002
    assert len(list(stream)) == 59
    assert left("ann") == 2000 - 62

    # A client that goes away after three words pays for these.
    stream = complete("bob", "acme", "hello model", output_max=1000)
    print("bob reads", next(stream), next(stream), next(stream), "and closes the connection")
    stream.close()
    assert left("bob") == 2000 - 5

    # Of two calls at once, the second does not get the budget that the first has reserved.
    stream = complete("ann", "acme", "hello model", output_max=1000)
    next(stream)
    try:
        next(complete("ann", "acme", "hello model", output_max=1000))
    except LimitExceeded as denied:
        print(f"ann's second call is denied by {denied.decision.rule}")
    assert left("ann", "requests") == 10 - 2  # the denied call is not counted
    # All users of the organisation share its budget. The tightest limit is reported.
    assert left("eve") == 3000 - 62 - 5 - 1002


if __name__ == "__main__":
    main()
