"""Charge the tokens that a streamed answer of a language model has used, in FastAPI.

Each limit of the route reserves the estimate, and a request that one of them denies costs nothing
in the others. `charge.settle(tokens)` is a plain call, and the last one counts. Call it with each
piece, and at the end: then the charge is right whenever the stream ends. Do not settle at 0 before
the first piece: a client that closes the connection by then would use the model for nothing.

The trap: if the estimate is lower than the real cost, `settle` charges the missing tokens in full.
The limit owes them, and the next requests are denied until time has paid them back. So let the
model stop at the number that was reserved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from ratekeeper.fastapi import Charge, RateLimit

MAX_TOKENS = 500
app = FastAPI()
# Requests are limited for the whole application, tokens on the route. In production the user and
# the organisation come from a verified token, and the store is shared://… or redis://….
# Tokens cost money, so none are spent while the store is away.
limit = RateLimit(app, "10_000/day", key="header:X-User", on_failure="closed")
user_tokens = limit("1000/day", key="header:X-User", cost=MAX_TOKENS, name="user tokens")
org_tokens = limit("1200/day", key="header:X-Org", cost=MAX_TOKENS, name="organisation tokens")


@app.post("/complete")
async def complete(
    user: Annotated[Charge, user_tokens], organisation: Annotated[Charge, org_tokens], words: int
) -> StreamingResponse:
    async def stream() -> AsyncIterator[str]:
        used = 0
        async for used, word in model(words, MAX_TOKENS):
            user.settle(used)
            organisation.settle(used)
            yield word
        user.settle(used)  # of an answer without a token, too
        organisation.settle(used)

    return StreamingResponse(stream(), media_type="text/plain")


async def model(words: int, max_tokens: int) -> AsyncIterator[tuple[int, str]]:
    """Stand in for a language model: a token is a word, and 666 words break the stream."""
    for used in range(1, min(words, max_tokens) + 1):
        if words == 666 and used > 100:
            raise ConnectionError("the model went away")
        yield used, "spam "


async def ask(user: str, words: int) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        headers = {"X-User": user, "X-Org": "acme"}
        return await client.post("/complete", params={"words": words}, headers=headers)


async def main() -> None:
    answers = [await ask("ann", 40) for _ in range(3)]  # 3 × 500 reserved, 3 × 40 charged
    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[2].headers["X-RateLimit-Remaining"] == str(1000 - 2 * 40 - MAX_TOKENS)

    await ask("zoe", 0)  # an empty answer costs nothing
    answer = await ask("zoe", 0)
    assert answer.headers["X-RateLimit-Remaining"] == str(1000 - MAX_TOKENS)

    await ask("bob", 666)  # breaks after 100 tokens, and costs 100
    answer = await ask("bob", 40)
    assert answer.headers["X-RateLimit-Remaining"] == str(1000 - 100 - MAX_TOKENS)
    assert len((await ask("bob", 5000)).text.split()) == MAX_TOKENS  # what was reserved

    answer = await ask("eve", 40)  # acme has used 120 + 100 + 40 + 500 of its 1,200
    assert answer.status_code == 429
    print("eve is denied:", answer.json()["detail"])


if __name__ == "__main__":
    asyncio.run(main())
