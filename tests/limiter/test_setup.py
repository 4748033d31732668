"""Setting up a limiter: its parts, its defaults, and closing its store."""

from __future__ import annotations

import pytest

from ratekeeper import ConfigError, Limit, Limiter, StoreUnavailable
from ratekeeper.decide.stores import open_store
from ratekeeper.testing import ManualClock

RULES = "version: 1\nrules:\n  - {id: user, by: user, limits: 2/minute}\n"


def test_a_limiter_has_the_parts_it_was_given() -> None:
    """Limits, store, clock and failure policy are readable."""
    clock = ManualClock()
    store = open_store("memory://", clock)
    limiter = Limiter("5/minute", store=store, clock=clock, on_failure="closed")
    assert limiter.limits == (Limit(5, per=60),)
    assert limiter.store is store
    assert limiter.clock is clock
    assert limiter.on_failure == "closed"


def test_a_limiter_from_rules_has_compiled_rules() -> None:
    """The document and its version are those in force, also after `use`."""
    with Limiter.from_rules(RULES) as limiter:
        assert [rule.id for rule in limiter.compiled_rules.document.rules] == ["user"]
        limiter.use(RULES.replace("id: user", "id: other"), version="7")
        assert [rule.id for rule in limiter.compiled_rules.document.rules] == ["other"]
        assert limiter.rules_status().version == "7"


@pytest.mark.parametrize("verb", ["compiled_rules", "penalties", "factors", "rules_status"])
def test_a_limiter_without_rules_has_no_compiled_rules(verb: str) -> None:
    """The error names the constructor to use."""
    limiter = Limiter("5/minute")
    with pytest.raises(ConfigError, match=r"Limiter\.from_rules"):
        getattr(limiter, verb)()


def test_close_leaves_a_shared_store_open() -> None:
    """A limiter closes the store only if it opened it."""
    store = open_store("memory://")
    Limiter("5/minute", store=store).close()
    assert store.counter((Limit(1, per=1),), "").check("k", 1).allowed
    own = Limiter("5/minute", on_failure="raise")
    own.close()
    with pytest.raises(StoreUnavailable):
        own.check("k")
