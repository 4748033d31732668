"""A decision with its grounds: what whoever answers a client needs beside yes or no.

A Decision speaks of the tightest limit alone, because that is all that a caller acts on. An answer
over HTTP or gRPC names every limit that applied, and says apart why there was none, or why the
store could not be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from tollkeeper.core.model import Decision, Limit

Kind = Literal["limited", "unlimited", "exempt", "blocked", "unavailable"]

# What a limiter's limits go by where it has no name.
DEFAULT_NAME: Final = "default"


class AppliedRule:
    """A rule and the limits it had for a request.

    Made once for all requests that meet the same limits, and equal only to itself: whoever derives
    something from it, such as a header, can keep that by it.
    """

    __slots__ = ("limits", "rule")

    def __init__(self, rule: str, limits: Sequence[Limit]) -> None:
        self.rule = rule
        self.limits = tuple(limits)

    def __repr__(self) -> str:
        return f"AppliedRule({self.rule!r}, {list(self.limits)!r})"


class CheckResult(NamedTuple):
    """What was decided on a request, and on what grounds."""

    decision: Decision
    applied: tuple[AppliedRule, ...] = ()
    """Every rule that had to pass, in the document's order."""
    kind: Kind = "limited"
    """`limited`      limits decided, or the failure policy in their place, and let it be.
    `unlimited`    no rule is for this request.
    `exempt`       it is on the allow list.
    `blocked`      it is on the deny list.
    `unavailable`  the store could not decide, and then nobody may pass.
    """
    shadow_denied: tuple[str, ...] = ()
    """The rules in shadow mode that would have denied it."""
    counted: tuple[tuple[str, int], ...] = ()
    """For each of `applied`, who is counted and for how many units; () where that is not known."""
