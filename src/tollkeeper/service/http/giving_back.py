"""Giving units back, for whoever holds a token.

Nobody keeps a list of what was reserved, so a caller who says that it was charged 100 and used 37
is believed. An application that asks by a token without a scope could as well not ask at all, and
may. A token with a scope may be in a customer's hands: what it gives back must be its own. So it is
given back under the rules that count only requests of its scope. Under the others, such as a limit
on the whole service, what was reserved stays spent until it is refilled: too few pass for a moment,
and never too many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import isawaitable
from typing import Final

from tollkeeper.core import switches
from tollkeeper.core.model import REQUEST_FIELDS, Request
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.rules.document.model import Rule
from tollkeeper.rules.in_force import charged

# A value that means itself as a pattern, too.
_PLAIN: Final = re.compile(r"[\w.@-]+")


async def give_back(
    limiter: AsyncLimiter, scope: Mapping[str, str], request: Request, units: int
) -> None:
    """Give units back, as far as the scope of a token reaches. Raises StoreError.

    `request` is in the scope already.
    """
    if not scope:
        await limiter.refund(request, units)
        return
    if switches.limiting_off:
        return
    for check in charged(limiter.compiled_rules, request, units):
        if counts_only(scope, check.rule):
            found = check.gate.refund(check.gate_subject, check.units)
            if isawaitable(found):
                await found


def counts_only(scope: Mapping[str, str], rule: Rule) -> bool:
    """Whether a rule counts requests of the scope apart from all others.

    >>> counts_only({"tenant": "acme"}, Rule("tenants", by=("tenant", "user")))
    True
    >>> counts_only({"tenant": "acme"}, Rule("service", by=()))
    False
    """
    return any(
        name in rule.by or (_patterns(rule, name) == (value,) and _PLAIN.fullmatch(value))
        for name, value in scope.items()
    )


def _patterns(rule: Rule, name: str) -> tuple[str, ...]:
    """What a request must have in this field for the rule to be for it."""
    if name in REQUEST_FIELDS:
        found: tuple[str, ...] = getattr(rule.match, name)
        return found
    return rule.match.attributes.get(name, ())
