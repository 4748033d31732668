"""Health and counts without a server. With servers: tests/integration/test_redis_health.py."""

from __future__ import annotations

from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.health import survey
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
