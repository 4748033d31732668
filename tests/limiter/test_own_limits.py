"""The limits of a limiter without rules count a key, or the fields of a Request."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from ratekeeper import ConfigError, Limiter, Request
from ratekeeper.testing import ManualClock


def test_requests_are_counted_by_their_fields(clock: ManualClock) -> None:
    """Tenant and user identify the request; other fields make no difference."""
    limiter = Limiter("1/m", clock=clock, by=["tenant", "user"])
    assert limiter.check(Request(tenant="t", user="u", endpoint="/a"))
    assert not limiter.check(Request(tenant="t", user="u", endpoint="/b"))
    assert limiter.check(Request(tenant="t", user="v"))
    assert limiter.check(Request(tenant="s", user="u"))
    assert limiter.check(Request(user="u"))
    assert not limiter.check(Request(user="u", ip="::1"))


@pytest.mark.parametrize("with_rules", [False, True])
def test_a_client_cannot_spend_the_quota_of_another_by_its_digest(with_rules: bool) -> None:
    """A key of long values has digests. A value that looks like one is a client of its own."""
    by = ["tenant", "user"]
    rules = {"version": 1, "rules": [{"id": "all", "by": by, "limits": ["5/day"]}]}
    limiter = Limiter.from_rules(rules) if with_rules else Limiter("5/day", by=by)
    victim = Request(tenant="t" * 480, user="u" * 60)
    for digested in (f"user:{victim.user}", victim.user or ""):
        digest = blake2b(digested.encode(), digest_size=16).hexdigest()
        for forged in (f"#{digest}", f":#{digest}", digest):
            assert limiter.check(Request(tenant=victim.tenant, user=forged), cost=5)
    assert limiter.check(victim, cost=5)


def test_every_verb_takes_a_request(clock: ManualClock) -> None:
    """Refund, grant, reset, wait and reserve identify a request in the same way."""
    limiter = Limiter("1/m", clock=clock, by=["user"])
    me = Request(user="me")
    limiter.check(me)
    limiter.refund(me)
    assert limiter.peek(me).remaining == 1
    limiter.grant(me, 2)
    assert limiter.wait(me, 3).remaining == 0
    limiter.reset(me)
    with limiter.reserve(me):
        assert limiter.peek(me).remaining == 0


def test_a_request_without_by_is_rejected() -> None:
    """The error shows a correct example."""
    with pytest.raises(ConfigError, match=r'by=\["tenant", "user"\]'):
        Limiter("1/m").check(Request(user="me"))


def test_a_limiter_with_by_still_accepts_keys(clock: ManualClock) -> None:
    """A plain key is counted under itself."""
    assert Limiter("1/m", clock=clock, by=["user"]).check("plain")
