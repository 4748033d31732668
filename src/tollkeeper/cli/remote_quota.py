"""What a check would answer, from the quota that a service tells: for `tollkeeper check --peek`.

`remaining` is how many units would pass at that instant, so whether a cost would is a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tollkeeper.cli.remote_print import dicts
from tollkeeper.core.errors import ConfigError


def verdict_of_quota(quota: Mapping[str, Any], cost: int) -> dict[str, Any]:
    """The members of an answer to a check that follow from a quota.

    Raises ConfigError for a cost that no wait would let pass.
    """
    denied: list[str] = []
    shadow_denied: list[str] = []
    limits: list[dict[str, Any]] = []
    for rule in dicts(quota.get("rules")):
        shadowed = rule.get("mode") == "shadow"
        units = cost * int(rule.get("cost", 1))
        for limit in dicts(rule.get("limits")):
            if units > limit["remaining"]:
                (shadow_denied if shadowed else denied).append(str(rule["rule"]))
            if not shadowed:
                _expect_fits(cost, units, rule, limit)
                limits.append({**limit, "rule": rule["rule"]})
    # The tightest: the least remaining.
    tightest = min(limits, key=lambda limit: int(limit["remaining"]), default={})
    names = ("rule", "limit", "remaining", "reset_after")
    return {
        "allowed": not denied and quota.get("kind") != "blocked",
        **{name: tightest.get(name) for name in names},
        "shadow_denied": list(dict.fromkeys(shadow_denied)),
    }


def _expect_fits(cost: int, units: int, rule: Mapping[str, Any], limit: Mapping[str, Any]) -> None:
    if units > limit["limit"]:
        raise ConfigError(
            f"--cost {cost} takes {units:,} units of rule {rule['rule']}, which can never fit "
            f"{limit.get('policy')}, which holds {limit['limit']:,} at most"
        )
