"""What the usage of a language model costs: its tokens, and their price.

Prices stand in the rule document, beside the rules: micro-dollars for a million tokens, for each
model and kind of token. A price of 2.50 dollars for a million tokens is 2_500_000.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ratekeeper.core.errors import ConfigError, quoted, show
from ratekeeper.core.model import units_of
from ratekeeper.rules.document.tree import suggestion

TOKENS: Final = "tokens"
MICRO_DOLLARS: Final = "micro_dollars"
MILLI_DOLLARS: Final = "milli_dollars"
_PRICED_TOKENS: Final = 1_000_000


def costs_of_usage(
    prices: Mapping[str, Mapping[str, int]],
    units: Collection[str],
    model: str,
    usage: Mapping[str, int],
) -> dict[str, int]:
    """Return the costs of a model's usage in those of the units that rules count.

    >>> prices = {"large": {"input": 2_500_000, "output": 10_000_000}}
    >>> usage = {"input": 900, "output": 301}
    >>> costs_of_usage(prices, ["requests", "tokens", "micro_dollars"], "large", usage)
    {'tokens': 1201, 'micro_dollars': 5260}
    """
    if not isinstance(usage, Mapping):
        raise ConfigError(
            f'usage={show(usage)} is not the tokens by kind; for example {{"input": 900}}'
        )
    priced = prices.get(model) if isinstance(model, str) else None
    if priced is None:
        raise ConfigError(
            f"the rules have no prices for the model {quoted(model)}; {suggestion(model, prices)}; "
            f"add it to `prices`"
        )
    for kind, tokens in usage.items():
        units_of(tokens, f"usage of {kind}")
        if kind not in priced:
            raise ConfigError(
                f"the model {quoted(model)} has no price for {quoted(kind)} tokens; "
                f"{suggestion(kind, priced)}"
            )
    money = sum(tokens * priced[kind] for kind, tokens in usage.items())
    costs = {
        TOKENS: sum(usage.values()),
        **{f"{kind}_{TOKENS}": tokens for kind, tokens in usage.items()},
        # Rounded up once, for all kinds: a usage that costs anything costs a micro-dollar.
        MICRO_DOLLARS: -(-money // _PRICED_TOKENS),
        # A limit holds 1,000,000,000 units, which is only 1,000 dollars in micro-dollars.
        MILLI_DOLLARS: -(-money // (_PRICED_TOKENS * 1_000)),
    }
    return {unit: cost for unit, cost in costs.items() if unit in units}
