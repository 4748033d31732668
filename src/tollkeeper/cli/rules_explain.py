"""`tollkeeper rules explain`: which rules a request meets, why, and what each says now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import unquote, urlsplit

import typer

from tollkeeper.cli.rules_options import DatabaseOption, JsonOption, MaybeFile, was_typed
from tollkeeper.cli.rules_print import OK, TROUBLE, say, say_json, say_table, telling, time_text
from tollkeeper.cli.rules_read import from_either
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import Decision, Limit, Request
from tollkeeper.core.subjects import SEPARATOR
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis.config import SCHEMES as REDIS_SCHEMES
from tollkeeper.limiter import Limiter
from tollkeeper.rules.document.writing import limit_data
from tollkeeper.rules.explain import Explanation, RuleExplained

# A person waits: a first connection takes longer than a check may.
_DEADLINE_MS: Final = 2_000


def explain(
    context: typer.Context,
    file: MaybeFile = None,
    database: DatabaseOption = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="As in /v1/orders/7.")
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="As in POST.")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="TEXT", help="As in sk_1.")] = None,
    user: Annotated[str | None, typer.Option(metavar="TEXT", help="As in 42.")] = None,
    ip: Annotated[str | None, typer.Option(metavar="TEXT", help="As in 192.0.2.1.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="TEXT", help="As in acme.")] = None,
    tier: Annotated[
        str | None, typer.Option(metavar="TEXT", help="As in pro. [default: what is assigned]")
    ] = None,
    attribute: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Any other; may be given many times.")
    ] = None,
    cost: Annotated[int, typer.Option(metavar="N", help="What the caller asks for.")] = 1,
    store: Annotated[
        str,
        typer.Option(
            envvar="TOLLKEEPER_STORE",
            metavar="URI",
            help="Where quotas are kept. Without it, as if nobody had spent anything yet.",
        ),
    ] = "memory://",
    as_json: JsonOption = False,
) -> None:
    """Say which rules a request meets and why, which not, and what each of them says now.

    The rules are those of FILE or, without one, the current ones of the database. With --store, the
    answers are those of the real store; nothing is spent.

    Exit code: 0 it is explained, whether allowed or denied; 1 the document has problems; 2 it
    cannot be read, or the store cannot tell.

    Example: tollkeeper rules explain limits.yaml --endpoint /v1/orders/7 --method POST --api-key
    sk_1

    Example: tollkeeper rules explain --user 42 --attribute region=eu --store redis://localhost
    """
    with telling(as_json):
        source = from_either(file, database, url_was_typed=was_typed(context, "database"))
        request = Request(
            user, api_key, ip, tenant, tier, endpoint, method, attributes_of(attribute or ())
        )
        with (
            closing(_opened(store)) as opened,
            Limiter.from_rules(source.document(), store=opened, follow=False) as limiter,
        ):
            explanation = limiter.explain(request, cost)
        if as_json:
            say_json({"source": source.name, **explanation_data(explanation)})
        else:
            say_explanation(explanation, source.name)
        untold = any(rule.error and not never_fits(rule) for rule in explanation.rules)
        raise typer.Exit(TROUBLE if untold else OK)


def attributes_of(given: Sequence[str]) -> dict[str, str]:
    """`--attribute name=value`, each of them. Raises ConfigError."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise ConfigError(f"--attribute {show(each)} has no name or no =; try region=eu")
        if name in found:
            raise ConfigError(f"--attribute {show(name)} is given twice")
        found[name] = value
    return found


def _opened(uri: str) -> Store:
    scheme = uri.partition("://")[0].lower()
    if scheme in REDIS_SCHEMES:
        return open_store(uri, deadline_ms=_DEADLINE_MS)
    if scheme == "shared" and not Path(unquote(urlsplit(uri).path)).exists():
        # To open it would make it, and as whoever runs this.
        raise ConfigError("--store names a file that is not there; start the service first")
    return open_store(uri)


def explanation_data(explanation: Explanation) -> dict[str, object]:
    """An explanation for JSON."""
    return {
        "verdict": verdict(explanation),
        "tier": explanation.tier,
        "listed": explanation.listed or None,
        "rules": [_rule_data(rule) for rule in explanation.rules],
    }


def verdict(explanation: Explanation) -> str:
    """`allowed`, `denied`, or `unknown` if a rule that is in force could not tell."""
    if explanation.listed:
        return "denied" if explanation.listed.startswith("deny ") else "allowed"
    enforced = [rule for rule in explanation.applying if rule.mode == "enforce"]
    decisions = [rule.decision for rule in enforced]
    if any(map(never_fits, enforced)) or any(each is not None and not each for each in decisions):
        return "denied"
    return "unknown" if None in decisions else "allowed"


def never_fits(rule: RuleExplained) -> bool:
    """Is there no decision because the cost is more than a limit can ever hold?"""
    return rule.decision is None and any(rule.units > limit.capacity for limit in rule.limits)


def _rule_data(rule: RuleExplained) -> dict[str, object]:
    override = rule.override
    return {
        "id": rule.id,
        "applies": rule.applies,
        "why": rule.why,
        "mode": rule.mode,
        "by": list(rule.by),
        "subject": rule.subject.split(SEPARATOR) if rule.subject else None,
        "units": rule.units if rule.applies else None,
        "limits": [limit_data(limit) for limit in rule.limits],
        "source": rule.source or None,
        "override": override
        and {
            "reason": override.reason,
            "author": override.author,
            "until": override.until and override.until.isoformat(),
        },
        "factor": rule.factor,
        "decision": None if rule.decision is None else _decision_data(rule.decision),
        "error": rule.error or None,
    }


def _decision_data(decision: Decision) -> dict[str, object]:
    return {
        "allowed": decision.allowed,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "retry_after": decision.retry_after,
        "reset_after": decision.reset_after,
        "delay": decision.delay,
        "tightest": limit_data(decision.policy),
    }


def say_explanation(explanation: Explanation, name: str) -> None:
    """Print the verdict, and each rule on a line."""
    told = verdict(explanation)
    if explanation.listed:
        told += f": on the list: {explanation.listed}"
    elif not explanation.applying:
        told += ": no rule applies"
    say(f"{told} ({name}; tier: {explanation.tier or 'none'}; nothing was spent)")
    if explanation.rules:
        headings = ("RULE", "APPLIES", "COUNTS", "LIMITS", "FROM", "NOW", "WHY")
        say_table(headings, [_rule_row(rule) for rule in explanation.rules])


def _rule_row(rule: RuleExplained) -> tuple[str, ...]:
    applies = "no"
    if rule.applies:
        applies = "yes" if rule.mode == "enforce" else rule.mode
    counts = rule.subject.replace(SEPARATOR, ", ") or ", ".join(rule.by)
    limits = "; ".join(map(_limit_text, rule.limits))
    if rule.factor != 1:
        limits += f" (at {rule.factor:.0%}, by the load)"
    return rule.id, applies, counts or "all", limits, _from_text(rule), _now_text(rule), rule.why


def _limit_text(limit: Limit) -> str:
    said = limit_data(limit)
    if isinstance(said, str):
        return said
    number, window, algorithm = said.pop("limit"), said.pop("per"), said.pop("algorithm")
    others = "".join(f" {name} {value}" for name, value in said.items())
    return f"{number}/{window} {algorithm}{others}"


def _from_text(rule: RuleExplained) -> str:
    if rule.override is None:
        return rule.source
    told: list[Any] = [rule.override.reason, rule.override.author]
    if rule.override.until:
        told.append(f"until {time_text(rule.override.until)}")
    details = ", ".join(filter(None, told))
    return f"{rule.source} ({details})" if details else rule.source


def _now_text(rule: RuleExplained) -> str:
    decision = rule.decision
    if decision is None:
        return rule.error.partition("\n")[0]
    left = f"{decision.remaining:,} of {decision.limit:,} left"
    costs = f", costs {rule.units:,}" if rule.units != 1 else ""
    if decision.allowed:
        delay = f", after {_seconds(decision.delay)}" if decision.delay else ""
        return f"allows, {left}{costs}{delay}"
    return f"denies, {left}{costs}, again in {_seconds(decision.retry_after)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
