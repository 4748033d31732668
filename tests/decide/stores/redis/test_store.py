"""RedisStore without a server. With servers: tests/integration/test_redis_store.py."""

from __future__ import annotations

import pytest

from ratekeeper import Limit, StoreUnavailable
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.connections import NotSent
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.answering import answer, awaited

LIMITS = (Limit(5, per=60),)


def test_opening_a_store_connects_to_nothing() -> None:
    """An application can start while Redis is down."""
    store = RedisStore(parse("redis://127.0.0.1:1"))
    assert isinstance(store, Store)
    assert store.counter(LIMITS, "rule").limits == LIMITS
    assert store.counters() == {"denied_cache_hits": 0, "coalesced_checks": 0}
    assert (store.breakers(), store.denied_by_rule(), store.sweep()) == ([], {}, 0)
    store.close()


def test_a_check_of_a_dead_server_counts_as_a_failure() -> None:
    """Its breaker counts the call."""
    store = RedisStore(parse("redis://127.0.0.1:1"))
    with pytest.raises(StoreUnavailable, match="cannot connect"):
        answer(store.counter(LIMITS, "rule").check("alice", 1))
    (breaker,) = store.breakers()
    assert (breaker.address, breaker.state, breaker.failed_calls) == ("127.0.0.1:1", "closed", 1)
    store.close()


async def test_asyncio_reports_the_same_error() -> None:
    """A check of one subject raises it; of several subjects, each has it as its answer."""
    store = RedisStore(parse("redis://127.0.0.1:1"))
    counter = store.counter(LIMITS, "rule")
    with pytest.raises(StoreUnavailable, match="cannot connect"):
        await awaited(counter.check("alice", 1))
    answers = await awaited(store.check_together([(counter, "alice", 1), (counter, "bob", 1)]))
    assert [type(answer) for answer in answers] == [NotSent, NotSent]
    assert store.check_together([]) == []
    await store.aclose()


def test_a_closed_store_makes_no_counters() -> None:
    """Every call says that it is closed."""
    store = RedisStore(parse("redis://127.0.0.1:1"))
    counter = store.counter(LIMITS, "rule")
    store.close()
    for call in (
        lambda: store.counter(LIMITS, "rule"),
        lambda: answer(counter.check("alice", 1)),
        store.stats,
        store.health,
    ):
        with pytest.raises(StoreUnavailable, match="the store is closed"):
            call()
