"""Write a document as plain data or YAML, in one canonical form to show, compare and store.

Reading the result returns an equal document. Fields with their default value are left out, limits
are written as rates where a rate can express them, and lists have one entry per line. So two
versions differ only in the lines that changed.

The order matters, because the first rule, key or cost that matches applies. A database must
therefore store a document as text, or in a column type that preserves the order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import REQUEST_FIELDS, Consistency, Limit, Limits, duration_text
from ratekeeper.rules.document.grammar import VERSION
from ratekeeper.rules.document.model import (
    Document,
    Match,
    Override,
    PenaltySettings,
    Rule,
    Scale,
)
from ratekeeper.rules.document.tree import EXPONENT

Data = dict[str, Any]

_WIDTH: Final = 100


def to_yaml(document: Document) -> str:
    """Return the document as YAML, for `read`."""
    try:
        import yaml  # noqa: PLC0415 - an extra that plain data does not need
    except ImportError:
        raise ConfigError(
            "rule documents in YAML need PyYAML, which is not installed; "
            "install it with: pip install 'ratekeeper[rules]'"
        ) from None
    data = to_data(document)
    for name in {"allow", "deny"} & data.keys():
        data[name] = _Lines(data[name])
    text: str = yaml.dump(
        data,
        Dumper=_dumper(),
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=_WIDTH,
    )
    return text


def to_data(document: Document) -> Data:
    """Return the document as plain data (dict, list, str, numbers), for `from_data`.

    >>> to_data(Document(tiers={"free": (Limit(100, per=60),)}))
    {'version': 1, 'tiers': {'free': ['100/minute']}}
    """
    return {
        "version": VERSION,
        **_given(
            tiers=_by_name(document.tiers, document.tier_consistency),
            rules=[_rule(rule) for rule in document.rules],
            assign=dict(document.assign),
            allow=list(document.allow),
            deny=list(document.deny),
            overrides=[_override(override) for override in document.overrides],
        ),
    }


def limit_data(limit: Limit) -> str | Data:
    """Return a limit as a rate or, if a rate cannot express it, as a mapping.

    >>> limit_data(Limit(1000, per=60, burst=200))
    '1000/minute burst 200'
    >>> limit_data(Limit(5, per=60, algorithm="sliding_window_log"))
    '5 in any minute'
    >>> limit_data(Limit(5, per=90, name="logins"))
    {'limit': 5, 'per': '90s', 'algorithm': 'token_bucket', 'name': 'logins'}
    """
    if not limit.name:
        return str(limit)
    # A burst cannot express a capacity below the limit.
    room = {"burst": limit.burst} if limit.burst else {"capacity": limit.capacity}
    return {
        "limit": limit.limit,
        "per": duration_text(limit.window_ns),
        "algorithm": limit.algorithm,
        **(room if limit.capacity != limit.limit else {}),
        "name": limit.name,
        **({"refill_every": duration_text(limit.refill_step_ns)} if limit.refill_every else {}),
    }


def _given(**values: Any) -> Data:
    """Return the values that are neither None nor empty."""
    return {name: value for name, value in values.items() if value not in (None, "", [], {})}


def _limits(limits: Limits) -> list[str | Data]:
    return [limit_data(limit) for limit in limits]


def _by_name(limits: Mapping[str, Limits], consistency: Mapping[str, Consistency]) -> Data:
    return {
        name: {"limits": _limits(each), "consistency": consistency[name]}
        if name in consistency
        else _limits(each)
        for name, each in limits.items()
    }


def _rule(rule: Rule) -> Data:
    usual = Rule(id="", by=())
    changed = (
        *("consistency", "scope", "across_regions", "on_failure", "mode", "replaces"),
        *("rollout", "split", "envoy_quota"),
    )
    return {
        "id": rule.id,
        **_given(match=_match(rule.match)),
        "by": list(rule.by),
        **_given(
            limits=_limits(rule.limits),
            tiers=_by_name(rule.tiers, rule.tier_consistency),
            keys=_by_name(rule.keys, rule.key_consistency),
            cost=_cost(rule),
        ),
        **{
            name: value
            for name in changed
            if (value := getattr(rule, name)) != getattr(usual, name)
        },
        **_given(scale=_scales(rule.scale), penalty=_penalty(rule.penalty)),
    }


def _match(match: Match) -> Data:
    conditions = {name: _one_or_many(getattr(match, name)) for name in REQUEST_FIELDS}
    attributes = {name: _one_or_many(patterns) for name, patterns in match.attributes.items()}
    return _given(**conditions, attributes=attributes)


def _one_or_many(patterns: tuple[str, ...]) -> str | list[str]:
    return patterns[0] if len(patterns) == 1 else list(patterns)


def _cost(rule: Rule) -> int | dict[str, int] | None:
    rest = None if rule.cost == 1 else rule.cost
    if not rule.costs:
        return rest
    return {**rule.costs, **({} if rest is None else {"*": rest})}


def _scales(scales: tuple[Scale, ...]) -> Data | list[Data] | None:
    found = [_scale(each) for each in scales]
    return found[0] if len(found) == 1 else found or None


def _scale(scale: Scale) -> Data:
    usual = Scale()
    changed = {
        name: _plain(value)
        for name, value, default in (
            ("most", scale.most, usual.most),
            ("idle", scale.idle, usual.idle),
            ("stale_after", scale.stale_after_s, usual.stale_after_s),
        )
        if value is not None and value != default
    }
    return {
        "source": scale.source,
        "low": scale.low,
        "high": scale.high,
        "least": scale.least,
        "smoothing": _plain(scale.smoothing_s),
        **changed,
    }


def _penalty(penalty: PenaltySettings | None) -> Data | None:
    if penalty is None:
        return None
    return {
        "after": penalty.after,
        "within": _plain(penalty.within_s),
        "cooldown": _plain(penalty.cooldown_s),
        "cooldown_max": _plain(penalty.cooldown_max_s),
        "block_after": penalty.block_after,
        "block": _plain(penalty.block_s),
        "decay": _plain(penalty.decay_s),
    }


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _override(override: Override) -> Data:
    until = override.until and override.until.isoformat().replace("+00:00", "Z")
    return {
        **_given(id=override.id),
        "for": {override.attribute: override.value},
        **_given(
            rule=override.rule,
            limits=_limits(override.limits),
            multiply=override.multiply and _plain(override.multiply),
            until=until,
            reason=override.reason,
            author=override.author,
        ),
    }


class _Lines(list[str]):
    """A list that is written with one entry per line, however short it is."""


@cache
def _dumper() -> Any:
    import yaml  # noqa: PLC0415 - see above

    parent: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(parent):  # type: ignore[misc]  # one of two classes, chosen at run time
        """Writes no anchors, and `_Lines` with one entry per line."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - for every value
            return True

    # Text that the reader would take for a number must be quoted.
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-0123456789"))
    Dumper.add_representer(
        _Lines,
        lambda dumper, lines: dumper.represent_sequence(
            "tag:yaml.org,2002:seq", lines, flow_style=False
        ),
    )
    return Dumper
