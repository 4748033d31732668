"""Health and counts without a server. With servers: tests/integration/test_redis_health.py."""

from __future__ import annotations

import pytest

from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.health import count_states, health, survey
from ratekeeper.decide.stores.redis.topology import Topology

CONFIG = parse("redis://:s3cret@127.0.0.1:1")


def test_a_survey_contains_a_dead_server() -> None:
    """The survey has the reason, a finding and its remedy for it."""
    found = survey(Topology(CONFIG), CONFIG)
    (server,) = found.nodes
    assert not server.reachable
    assert server.reason
    (finding,) = found.findings
    assert (finding.check, finding.level) == ("connection", "problem")
    assert found.warnings == [str(finding)]
    assert "start it, or correct its address" in str(finding)


def test_health_raises_if_no_server_answers() -> None:
    """The error names each server and contains no secret."""
    with pytest.raises(StoreUnavailable, match=r"no server answers: 127\.0\.0\.1:1") as caught:
        health(Topology(CONFIG), CONFIG)
    assert "s3cret" not in str(caught.value)


def test_counting_raises_if_a_primary_does_not_answer() -> None:
    """An incomplete count would be wrong."""
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
        count_states(Topology(CONFIG), CONFIG.prefix)
