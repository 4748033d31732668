"""Hypothesis strategies for valid rule documents as plain data, in all forms people may write."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ratekeeper.core.model import BUCKETS, CONSISTENCIES, UNIT_ALGORITHMS
from ratekeeper.regions.settings import ACROSS_REGIONS
from ratekeeper.rules.document.model import (
    ENVOY_QUOTAS,
    MODES,
    ON_FAILURES,
    RESERVED_NAMES,
    SHARE_SOURCES,
)

Data = dict[str, Any]

SECONDS = {
    "ms": 0.001,
    "1.5ms": 0.0015,
    "second": 1,
    "90s": 90,
    "MINUTE": 60,
    "2h": 7200,
    "day": 86400,
}
ENDPOINTS = [
    "/",
    "/login",
    "/users/{id}",
    "/v1/*/items",
    "/v1/orders/*",
    "/a/**/b",
    "re:/v[0-9]+/.*",
]
GLOBS = ["42", "off", "sk_live_*", "a?c", "[ab]*", "*", "é*", "x: y", "# no comment", "2026-01-01"]
NETWORKS = ["10.0.0.0/8", "192.0.2.7", "2001:db8::/32", "::1"]
ENTRIES = [
    "api_key:sk_internal_*",
    "user:42",
    "ip:10.0.0.0/8",
    "192.0.2.7",
    "region:eu",
    "user:a?c",
    "tenant:a*",
]


def _is_id(name: str) -> bool:
    return not name.startswith(RESERVED_NAMES)


# Any printable text may be a name, also text that YAML would read as another type.
names = st.one_of(
    st.sampled_from(
        ["free", "pro", "off", "42", "1.5", "null", "~", "2026-01-01", "<<", "a: b", "-"]
    ),
    st.text(min_size=1, max_size=12).filter(str.isprintable),
)
attribute_names = st.sampled_from(["region", "plan", "agent_2", "_x"])
subjects = st.sampled_from(
    ["user", "api_key", "ip", "tenant", "tier", "endpoint", "method", "region"]
)


@st.composite
def limits_in_full(draw: st.DrawFn, window: str, named: bool) -> Data:
    algorithm = draw(st.sampled_from(UNIT_ALGORITHMS))
    limit: Data = {"limit": draw(st.integers(1, 1_000_000))}
    seconds = SECONDS[window]
    limit["per"] = draw(st.sampled_from([seconds, window]))
    if draw(st.booleans()) or algorithm != "token_bucket":
        limit["algorithm"] = algorithm
    if algorithm in BUCKETS:
        limit.update(draw(st.sampled_from([{}, {"burst": 0}, {"burst": 7}, {"capacity": 5}])))
    if named:
        limit["name"] = draw(names)
    if algorithm == "token_bucket" and limit.get("capacity") is None:
        limit.update(draw(st.sampled_from([{}, {"refill_every": 0}, {"refill_every": seconds}])))
    return limit


@st.composite
def rates(draw: st.DrawFn, window: str) -> str:
    count = draw(st.integers(1, 1_000_000))
    per = draw(st.sampled_from(["/", " per ", " / "]))
    room = draw(st.sampled_from(["", " burst 5", " capacity 3", "  BURST 1_000"]))
    refill = f" refill {window}" if "capacity" not in room and draw(st.booleans()) else ""
    return f"{count}{per}{window}{room}{refill}"


@st.composite
def limits(draw: st.DrawFn) -> Any:
    """One to three limits with different windows, so that no two share a count."""
    windows = draw(st.lists(st.sampled_from(list(SECONDS)), min_size=1, max_size=3, unique=True))
    # A limit with a name is counted under the name, and two limits may not share a count.
    found = [
        draw(rates(window) | limits_in_full(window, place == 0 and draw(st.booleans())))
        for place, window in enumerate(windows)
    ]
    if all(isinstance(limit, str) for limit in found) and draw(st.booleans()):
        return ";".join(found)
    return found[0] if len(found) == 1 and draw(st.booleans()) else found


def one_or_many(values: list[str]) -> st.SearchStrategy[Any]:
    one = st.sampled_from(values)
    return one | st.lists(one, min_size=1, max_size=3)


def optional(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Data]:
    return st.fixed_dictionaries({}, optional=parts)


matches = optional(
    endpoint=one_or_many(ENDPOINTS),
    method=one_or_many(["GET", "post", "M-SEARCH"]),
    user=one_or_many(GLOBS),
    api_key=one_or_many(GLOBS),
    ip=one_or_many(NETWORKS),
    tenant=one_or_many(GLOBS),
    tier=one_or_many(GLOBS),
    attributes=st.dictionaries(attribute_names, one_or_many(GLOBS), max_size=2),
)

_scale_numbers = {
    "least": st.floats(0.01, 1),
    "smoothing": st.sampled_from([0, 2.5, "10s", "1m"]),
    "stale_after": st.sampled_from([1, 2.5, "30s", "1d"]),
}
share_scales = optional(
    source=st.sampled_from(SHARE_SOURCES),
    low=st.floats(0, 0.7),
    high=st.floats(0.71, 1),
    **_scale_numbers,
)
pushed_scales = st.fixed_dictionaries(
    {"source": st.just("queue_depth"), "low": st.floats(1, 700), "high": st.floats(701, 1e15)},
    optional={"most": st.floats(1.01, 1.5), **_scale_numbers},
)
scales = share_scales | pushed_scales | st.tuples(share_scales, pushed_scales).map(list)

penalties = optional(
    after=st.integers(1, 10_000),
    within=st.sampled_from([1, 2.5, "10s", "1m"]),
    cooldown=st.sampled_from([1, "10s"]),
    cooldown_max=st.sampled_from([60, "10m"]),
    block_after=st.integers(1, 100),
    block=st.sampled_from([60, "1h", "30d"]),
    decay=st.sampled_from([60, "1h"]),
)

units = st.integers(0, 1_000_000)
costs = units | st.dictionaries(st.sampled_from(ENDPOINTS), units, max_size=3).flatmap(
    lambda costs: st.sampled_from([costs, {**costs, "*": 3}])
)


def limits_of_one() -> st.SearchStrategy[object]:
    """The limits of a tier or key, some with their consistency."""
    in_full = optional(consistency=st.sampled_from(CONSISTENCIES))
    return limits() | st.builds(lambda found, more: {"limits": found, **more}, limits(), in_full)


assigned = st.fixed_dictionaries(
    {"consistency": st.just("leased"), "envoy_quota": st.sampled_from(ENVOY_QUOTAS)},
    optional={"mode": st.sampled_from(["enforce", "off"]), "split": st.just(1), "cost": st.just(1)},
)


@st.composite
def rules(draw: st.DrawFn, name: str, tiers: dict[str, object]) -> Data:
    by = draw(st.lists(subjects, max_size=3, unique=True))
    rule: Data = {"id": name, "by": by[0] if len(by) == 1 and draw(st.booleans()) else by}
    if not tiers or draw(st.booleans()):
        rule["limits"] = draw(limits())
    if tiers:
        by_tier = st.dictionaries(st.sampled_from(list(tiers)), limits_of_one(), max_size=2)
        rule |= draw(optional(tiers=by_tier))
    if len(by) == 1:
        by_key = st.dictionaries(st.sampled_from(GLOBS), limits_of_one(), max_size=2)
        rule |= draw(optional(keys=by_key))
    if not by and not tiers and draw(st.booleans()):
        return {"id": name, "by": [], "limits": "9/s", **draw(assigned)}
    if draw(st.booleans()):
        rule |= draw(optional(consistency=st.sampled_from(CONSISTENCIES)))
    elif not any(word in f"{rule} {tiers}" for word in ("leased", "eventual")):
        rule |= {
            "scope": "global",
            **draw(optional(across_regions=st.sampled_from(ACROSS_REGIONS))),
        }
    return rule | draw(
        optional(
            match=matches,
            cost=costs,
            on_failure=st.sampled_from(ON_FAILURES),
            mode=st.sampled_from(MODES),
            rollout=st.integers(0, 100),
            scale=scales,
            split=st.integers(1, 64),
            penalty=penalties,
        )
    )


@st.composite
def overrides(draw: st.DrawFn, rule_ids: list[str]) -> Data:
    owner = draw(st.sampled_from(["user", "api_key", "tenant"]))
    override: Data = {"for": {owner: draw(names)}}
    if draw(st.booleans()):
        override["limits"] = draw(limits())
    else:
        override["multiply"] = draw(st.floats(0.001, 1_000) | st.integers(1, 1_000))
    if rule_ids:
        override |= draw(optional(rule=st.sampled_from(rule_ids)))
    times = ["2026-12-31T23:59:59Z", "2026-12-31 23:59:59.25+02:00", "0001-02-03T04:05:06-07:00"]
    return override | draw(
        optional(until=st.sampled_from(times), reason=names, author=names),
    )


@st.composite
def documents(draw: st.DrawFn) -> Data:
    """A valid document as plain data."""
    tiers = draw(st.dictionaries(names, limits_of_one(), max_size=3))
    ids = draw(st.lists(names.filter(_is_id), max_size=4, unique=True))
    data: Data = {"version": 1}
    if tiers:
        owners = st.builds("{}:{}".format, st.sampled_from(["user", "api_key", "tenant"]), names)
        data |= {"tiers": tiers}
        data |= draw(
            optional(assign=st.dictionaries(owners, st.sampled_from(list(tiers)), max_size=3))
        )
    if ids:
        data["rules"] = [draw(rules(name, tiers)) for name in ids]
    entries = one_or_many(ENTRIES) | st.just([])
    return data | draw(
        optional(allow=entries, deny=entries, overrides=st.lists(overrides(ids), max_size=3))
    )
