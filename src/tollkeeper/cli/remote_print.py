"""What `tollkeeper check` and its like print of a service's answers.

The answers come from another program, perhaps of another version: what is missing is left out, and
nothing in them can end this one with a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tollkeeper.cli.rules_print import say, say_table

_HEADINGS: Final = ("RULE", "COUNTS", "LIMIT", "FROM", "LEFT", "WHOLE AGAIN")


def say_check(answer: Mapping[str, Any], several: Mapping[str, int], would: str = "") -> None:
    """Print the answer as a line; of several, how many were allowed, and the last of them."""
    line = f"{would}{check_text(answer)}"
    if several["count"] > 1:
        allowed, denied = several["allowed"], several["denied"]
        line = f"allowed {allowed:,}, denied {denied:,} of {several['count']:,}; the last: {line}"
    say(line)


def check_text(answer: Mapping[str, Any]) -> str:
    """One answer: yes or no, on what grounds, and when to come back."""
    verdict = "allowed" if answer.get("allowed") else "denied"
    parts = [_grounds(answer)]
    if answer.get("delay"):
        parts.append(f"to be served after {seconds_text(answer['delay'])}")
    if not answer.get("allowed") and answer.get("retry_after"):
        parts.append(f"again in {seconds_text(answer['retry_after'])}")
    if shadow := answer.get("shadow_denied"):
        parts.append(f"would be denied by the shadow rules: {', '.join(map(str, shadow))}")
    return f"{verdict}: {', '.join(parts)}"


def _grounds(answer: Mapping[str, Any]) -> str:
    kind = answer.get("kind")
    if kind == "exempt":
        return "on the allow list"
    if kind == "blocked":
        return "on the deny list"
    if kind == "unlimited":
        return "no rule applies"
    rule = f" of rule {answer['rule']}" if answer.get("rule") else ""
    if kind == "unavailable" or answer.get("degraded"):
        return f"the store cannot decide, so the failure policy{rule} does"
    return f"{_left(answer)} left{rule}"


def _left(answer: Mapping[str, Any]) -> str:
    return f"{number_text(answer.get('remaining'))} of {number_text(answer.get('limit'))}"


def request_text(fields: Mapping[str, Any]) -> str:
    """A request's fields on one line."""
    flat = {name: value for name, value in fields.items() if name != "attributes"}
    flat |= fields.get("attributes", {})
    return ", ".join(f"{name} {value}" for name, value in flat.items()) or "a request of nobody"


def number_text(value: object) -> str:
    """A count; a question mark for what is none."""
    return f"{value:,}" if isinstance(value, int) else "?"


def seconds_text(value: object) -> str:
    """A length of time, to three digits."""
    if not isinstance(value, int | float):
        return "?"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def say_quota(answer: Mapping[str, Any]) -> None:
    """Print every limit of every rule that applies, each on a line."""
    rows = [
        _quota_row(rule, limit)
        for rule in dicts(answer.get("rules"))
        for limit in dicts(rule.get("limits"))
    ]
    if rows:
        say_table(_HEADINGS, rows)
    else:
        say(_grounds(answer))


def dicts(value: object) -> list[Mapping[str, Any]]:
    """The JSON objects in a list; none, if it is no list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _quota_row(rule: Mapping[str, Any], limit: Mapping[str, Any]) -> tuple[str, ...]:
    shadow = " (shadow)" if rule.get("mode") == "shadow" else ""
    reset_after = limit.get("reset_after")
    return (
        f"{rule.get('rule', '?')}{shadow}",
        str(rule.get("subject") or "all"),
        str(limit.get("policy", "?")),
        str(rule.get("source", "?")),
        _left(limit),
        "now" if reset_after == 0 else f"in {seconds_text(reset_after)}",
    )
