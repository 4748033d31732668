"""Limiters of both kinds, on every store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limiter
from ratekeeper.decide.store import Store
from ratekeeper.testing import ManualClock


class Awaited:
    """AsyncLimiter with the verbs of Limiter: each call runs to its end in one event loop."""

    def __init__(self, runner: asyncio.Runner, limiter: AsyncLimiter) -> None:
        self._runner = runner
        self._limiter = limiter

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._limiter, name)

        def awaited(*args: Any, **kwargs: Any) -> Any:
            async def call() -> Any:
                return await verb(*args, **kwargs)

            return self._runner.run(call())

        return awaited

    @contextmanager
    def reserve(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Enter and leave the block in the event loop."""
        held = self._limiter.reserve(*args, **kwargs)
        reservation = self._runner.run(held.__aenter__())

        async def use(*units: Any, **costs: Any) -> bool:
            return reservation.use(*units, **costs)

        try:
            yield SimpleNamespace(
                decision=reservation.decision, use=lambda *a, **k: self._runner.run(use(*a, **k))
            )
        except BaseException:
            self._runner.run(held.__aexit__(*sys.exc_info()))
            raise
        self._runner.run(held.__aexit__(None, None, None))


@pytest.fixture(params=["threads", "asyncio"])
def make_limiter(request: pytest.FixtureRequest, store: Store, clock: ManualClock) -> Iterator[Any]:
    """Return a function that makes a limiter of either kind, from limits or from rules."""
    runner = asyncio.Runner()

    def make(limits: str = "", rules: str = "", **options: Any) -> Any:
        kind = Limiter if request.param == "threads" else AsyncLimiter
        if rules:
            limiter: Any = kind.from_rules(rules, store=store, clock=clock, **options)
        else:
            limiter = kind(limits, store=store, clock=clock, **options)
        return limiter if request.param == "threads" else Awaited(runner, limiter)

    with runner:
        yield make
        if hasattr(store, "aclose"):
            runner.run(store.aclose())
