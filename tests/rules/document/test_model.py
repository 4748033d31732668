"""The values of a rule document: frozen, and with the defaults that the documentation names."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from ratekeeper.core.model import REQUEST_FIELDS
from ratekeeper.rules.document.model import (
    Document,
    Match,
    Override,
    PenaltySettings,
    Rule,
    Scale,
)

VALUES = (
    Document(),
    Match(),
    Override("user", "ann"),
    PenaltySettings(),
    Rule("orders", by=("user",)),
    Scale(),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen_and_equal_by_content(value: object) -> None:
    """A compiled table can rely on them; they have no `__dict__` either."""
    copy = type(value)(**{each.name: getattr(value, each.name) for each in fields(value)})  # type: ignore[arg-type]  # each is a dataclass
    assert copy == value
    assert not hasattr(value, "__dict__")
    name = fields(value)[0].name  # type: ignore[arg-type]  # each is a dataclass
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, None)


def test_a_match_has_a_condition_for_each_field_of_a_request() -> None:
    """And `attributes` for all others."""
    assert {each.name for each in fields(Match)} == {*REQUEST_FIELDS, "attributes"}


def test_a_rule_is_enforced_for_every_subject_by_default() -> None:
    """Without a mode, a roll-out or a cost, a rule applies to all subjects at a cost of 1."""
    rule = Rule("orders", by=("user",))
    assert (rule.mode, rule.rollout, rule.cost, rule.split) == ("enforce", 100, 1, 1)
    assert (rule.scale, rule.penalty, rule.on_failure) == ((), None, None)
