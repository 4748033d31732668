"""Options: wrong ones are rejected where they are written, and type checkers know all names."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from tollkeeper import ConfigError, Limiter, asgi, fastapi, flask, wsgi
from tollkeeper.decide.failure import LocalFallback
from tollkeeper.testing import ManualClock
from tollkeeper.web.identity import Identity
from tollkeeper.web.options import EnforcerOptions, OptionArguments

RULES = """
version: 1
rules:
  - {id: all, by: [ip], limits: ["2/minute"]}
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limits": "1/s", "rules": RULES}, "limits and rules both"),
        ({"limits": "1/s", "limiter": Limiter("1/s")}, "limits and limiter both"),
        ({"limits": "one"}, "write it like this"),
        ({"limits": "1/s", "skip": "/healthz"}, "skip='/healthz' is not a function"),
        ({"limits": "1/s", "count": 401}, "count=401 is not a function"),
        ({"limits": "1/s", "on_limit": True}, "on_limit=True is not a function"),
        ({"limits": "1/s", "cost": -1}, "cost"),
        ({"limits": "10/s; 5/minute", "cost": 6}, "cost=6 never fits"),
        ({"limits": "1/s", "style": "draft-7"}, "is not a Style"),
        ({"limits": "1/s", "on_failure": "perhaps"}, "on_failure"),
        ({"limits": "1/s", "name": "a\nb"}, "name="),
        ({"rules": RULES, "name": "x"}, "name and per_route apply to limits only"),
        ({"rules": RULES, "per_route": True}, "name and per_route apply to limits only"),
        ({"rules": RULES, "key": "header:X"}, "each rule's `by`"),
        ({"limiter": Limiter("1/s"), "store": "redis://x"}, "already has a store"),
        ({"limiter": Limiter("1/s"), "on_failure": "closed"}, "already has a store"),
        ({"limiter": Limiter("1/s"), "clock": ManualClock()}, "and a clock"),
        ({"limiter": Limiter("1/s"), "local_fallback": LocalFallback()}, "a local_fallback"),
        ({"identify": Identity(), "trusted_proxies": ["10.0.0.0/8"]}, "to the Identity"),
    ],
)
def test_wrong_options_are_rejected_at_once(options: dict[str, Any], said: str) -> None:
    """The error comes where the application is written and suggests a correct option."""
    with pytest.raises(ConfigError, match=said):
        EnforcerOptions(**options)


def test_an_integration_may_require_limits() -> None:
    """A middleware without limits would silently limit nothing."""
    with pytest.raises(ConfigError, match='RateLimit needs limits="100/minute"'):
        EnforcerOptions().require_limits("RateLimit")
    assert EnforcerOptions(limits="1/s").require_limits("RateLimit").has_limits


@pytest.mark.parametrize("integration", [asgi, fastapi, flask, wsgi])
def test_an_object_that_is_not_an_application_is_rejected(integration: Any) -> None:
    """The message asks for the application."""
    with pytest.raises(ConfigError, match=r"'100/minute' is not an? .*application; write"):
        integration.RateLimit("100/minute")


def test_the_typed_arguments_are_the_options() -> None:
    """Type checkers know exactly the options that exist."""
    assert {"limits", *get_type_hints(OptionArguments)} == set(get_type_hints(EnforcerOptions))
