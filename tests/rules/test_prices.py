"""Prices: what the usage of a model costs."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper import ConfigError, Limiter

PRICED = """
version: 1
rules:
  - {id: money, by: user, unit: UNIT, limits: 1000/minute}
prices:
  large: {input: 2_500_000, output: 10_000_000}
  small: {input: 1, output: 0}
"""


@pytest.mark.parametrize(
    ("unit", "model", "usage", "costs"),
    [
        ("tokens", "large", {"input": 900, "output": 301}, {"tokens": 1_201}),
        ("output_tokens", "large", {"input": 900, "output": 301}, {"output_tokens": 301}),
        ("micro_dollars", "large", {"input": 900, "output": 301}, {"micro_dollars": 5_260}),
        ("milli_dollars", "large", {"input": 900, "output": 301}, {"milli_dollars": 6}),
        ("micro_dollars", "small", {"input": 1}, {"micro_dollars": 1}),
        ("micro_dollars", "small", {"output": 10**9}, {"micro_dollars": 0}),
        ("micro_dollars", "small", {"input": 1_000_001}, {"micro_dollars": 2}),
        ("requests", "large", {"input": 900}, {}),
    ],
)
def test_costs_of_usage(
    unit: str, model: str, usage: dict[str, int], costs: dict[str, int]
) -> None:
    """Only the units that rules count, and money rounded up."""
    limiter = Limiter.from_rules(PRICED.replace("UNIT", unit))
    assert limiter.costs_of(model, usage) == costs


@pytest.mark.parametrize(
    ("model", "usage", "error"),
    [
        ("larg", {"input": 1}, 'no prices for the model "larg"; did you mean "large"?'),
        ("large", {"inputs": 1}, 'no price for "inputs" tokens; did you mean "input"?'),
        ("large", {"input": -1}, "usage of input=-1"),
        (["large"], {"input": 1}, "no prices for the model"),
        ("large", ["input"], "usage=['input'] is not the tokens by kind"),
    ],
)
def test_no_usage_is_free_by_a_slip(model: Any, usage: Any, error: str) -> None:
    """A model or a kind without a price is an error, which suggests the right one."""
    with pytest.raises(ConfigError) as caught:
        Limiter.from_rules(PRICED.replace("UNIT", "micro_dollars")).costs_of(model, usage)
    assert error in str(caught.value)
