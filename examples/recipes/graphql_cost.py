"""Limit a GraphQL API by the cost of its queries, before they run.

One request can ask for everything, so the number of requests says little. Here a field costs 1, and
a list costs its `first` times everything inside of it: the most that the query can return. A query
that can never fit gets 422.

What attackers try: aliases and several operations (each counts), lists inside of lists (the product
counts), a list without `first` (counts as the largest page), `first` in a variable (it is looked
up), fragments that use fragments (each use counts, and each fragment is read once), a text that is
very long or deep (`max_tokens`). The trap is a limit on the depth alone: aliases are flat.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request
from graphql import GraphQLSyntaxError, parse
from graphql.language import ast

from ratekeeper.fastapi import RateLimit, WebRequest
from ratekeeper.testing import ManualClock

PAGE_MAX = 100  # the resolvers must have the same maximum
COST_MAX = 1_000_000  # never fits
LISTS = {"orders", "items"}  # take them from your schema
INVALID = (GraphQLSyntaxError, RecursionError, ValueError, TypeError, KeyError, AttributeError)


def page_of(field: ast.FieldNode, variables: dict[str, Any]) -> int:
    """Return how many objects a field can return."""
    if field.name.value not in LISTS:
        return 1
    first = {each.name.value: each.value for each in field.arguments or ()}.get("first")
    given = getattr(first, "value", None)
    if isinstance(first, ast.VariableNode):
        given = variables.get(first.name.value)
    text = str(given)  # anything that is no small number counts as the largest page
    return min(max(int(text), 1), PAGE_MAX) if text.isdecimal() and len(text) < 5 else PAGE_MAX


def cost_of(query: str, variables: dict[str, Any]) -> int:
    document = parse(query, max_tokens=1000, no_location=True).definitions
    named = {d.name.value: d for d in document if isinstance(d, ast.FragmentDefinitionNode)}
    known: dict[str, int] = {}

    def cost(node: Any) -> int:
        total = 0
        for each in getattr(node.selection_set, "selections", ()):
            if isinstance(each, ast.FieldNode):
                total += page_of(each, variables) * (1 + cost(each))
            elif isinstance(each, ast.FragmentSpreadNode):
                if (name := each.name.value) not in known:
                    known[name] = 0  # for a fragment that uses itself, which GraphQL rejects
                    known[name] = cost(named[name]) if name in named else 0
                total += known[name]
            else:
                total += cost(each)  # an inline fragment
        return min(total, COST_MAX)

    return 1 + sum(cost(d) for d in document if isinstance(d, ast.OperationDefinitionNode))


async def cost(request: WebRequest) -> int:
    try:
        body = await request.native.json()  # the endpoint can read it again
        return cost_of(body["query"], dict(body.get("variables") or {}))
    except INVALID as error:
        raise HTTPException(400, "this is not a valid query") from error


app = FastAPI()
limit = RateLimit(app, "600/minute", clock=ManualClock())  # all requests, also invalid ones


@app.post("/graphql", dependencies=[limit("1000/minute", key="header:X-User", cost=cost)])
async def graphql(request: Request) -> Any:
    return await request.json()  # execute it here; X-User is from a gateway that verifies it


async def main() -> None:
    chain = "".join(f"fragment F{n} on Q {{a ...F{n + 1} ...F{n + 1}}}" for n in range(60))
    variable = "query($n: Int) {orders(first: $n) {items {id}}}"
    queries = [("{orders(first: 9) {id total}}", 200), ("{a: orders {id} b: orders {id}}", 200)]
    queries += [("{orders {id a b c d e f}}", 429), ("{orders {items {id}}}", 422), (variable, 422)]
    queries += [("{orders(first: 0) {" + "a " * 900 + "}}", 429)]  # an empty page is not free
    queries += [("{...F0}" + chain, 422), ("{" + "a " * 5000 + "}", 400), ("{a" * 300, 400)]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        for query, status in queries:
            body = {"query": query, "variables": {"n": "9" * 5000}}
            answer = await client.post("/graphql", json=body, headers={"X-User": "ann"})
            print(answer.status_code, f"{query:.50}")
            assert answer.status_code == status, query


if __name__ == "__main__":
    asyncio.run(main())
