"""Messages without a server. With servers: tests/integration/test_redis_pubsub.py."""

from __future__ import annotations

import pytest

from tollkeeper.core.errors import StoreUnavailable
from tollkeeper.decide.stores.redis.config import parse
from tollkeeper.decide.stores.redis.pubsub import RedisSubscription, publish
from tollkeeper.decide.stores.redis.topology import Topology

CONFIG = parse("redis://:s3cret@127.0.0.1:1")


def test_publishing_to_a_dead_server_raises_store_unavailable() -> None:
    """The error names the server and contains no secret."""
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1") as caught:
        publish(Topology(CONFIG), CONFIG, "tk:rules", "changed")
    assert "s3cret" not in str(caught.value)


def test_subscribing_to_a_dead_server_raises_store_unavailable() -> None:
    """The error names the server."""
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
        RedisSubscription(Topology(CONFIG), CONFIG, "tk:rules")
