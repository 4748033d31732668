"""`ratekeeper check`, `limit`, `quota`, `reset` and `grant`: calls to a running service.

The options of a command are the fields of a Request. The answers come from another program, perhaps
of another version: a member that is missing is not printed, and no answer can end a command with a
traceback. Exit codes: 0 allowed or done, 1 denied, 2 the call failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NoReturn

import typer

from ratekeeper.cli.common import (
    OK,
    PROBLEMS,
    JsonOption,
    ReasonOption,
    parse_duration_s,
    parse_pairs,
    print_json,
    print_table,
    print_text,
    seconds_text,
    with_options,
)
from ratekeeper.cli.service_client import (
    ServiceClient,
    ServiceError,
    json_objects,
    override_origin,
    service_client,
)
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import ALGORITHM_NAMES
from ratekeeper.core.rates import parse_limits
from ratekeeper.rules.document.grammar import limit_data

COUNT_MAX: Final = 100_000
_HEADINGS: Final = ("RULE", "COUNTS", "LIMIT", "FROM", "LEFT", "WHOLE AGAIN")


def request_fields(
    user: Annotated[str | None, typer.Option(metavar="TEXT", help="For example 42.")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="TEXT", help="For example sk_1.")] = None,
    ip: Annotated[str | None, typer.Option(metavar="TEXT", help="For example 192.0.2.1.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="TEXT", help="For example acme.")] = None,
    tier: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="For example pro. [default: the assigned tier]"),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="For example /v1/orders/7.")
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="For example POST.")] = None,
    attribute: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Any other field; can be repeated.")
    ] = None,
) -> dict[str, Any]:
    """Return the fields of a request that were given as options. Raises ConfigError."""
    options = {
        "user": user,
        "api_key": api_key,
        "ip": ip,
        "tenant": tenant,
        "tier": tier,
        "endpoint": endpoint,
        "method": method,
    }
    fields: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if attribute:
        fields["attributes"] = parse_pairs("--attribute", attribute, "region=eu")
    try:
        _request_text(fields).encode()
    except UnicodeEncodeError:
        raise ConfigError("an argument is not valid UTF-8; check how it was typed") from None
    return fields


@with_options(request=request_fields, service=service_client)
def check(
    request: dict[str, Any],
    service: ServiceClient,
    cost: Annotated[int, typer.Option(metavar="N", help="The units that each check costs.")] = 1,
    count: Annotated[
        int, typer.Option(metavar="N", help="Check N times, one after another, and sum up.")
    ] = 1,
    peek: Annotated[
        bool, typer.Option("--peek", help="Only show whether it would be allowed; charge nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check whether a request is allowed, and charge its cost if it is.

    Exit code: 0 allowed; 1 denied, or at least one of several was; 2 the call failed: no service,
    no token, or a cost that can never fit.

    Example: ratekeeper check --api-key sk_1 --endpoint /v1/orders/7 --method POST

    Example: ratekeeper check --user 42 --cost 5 --peek

    Example: ratekeeper check --user 42 --count 20 --json
    """
    if peek and (count != 1 or cost < 0):
        raise ConfigError("--peek checks once, with a --cost of 0 or more; remove --count")
    ask = _peek if peek else _check
    _check_often(service, count, lambda: ask(service, request, cost), as_json, peek=peek)


@with_options(service=service_client)
def limit(
    service: ServiceClient,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the limits: emails.")],
    key: Annotated[
        list[str],
        typer.Argument(metavar="KEY", help="The key that is counted, or its parts: user:42."),
    ],
    limits: Annotated[
        list[str],
        typer.Option(
            "--limit", metavar="RATE", help="For example 10/minute; repeat it for several limits."
        ),
    ],
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For example fixed_window. [default: token_bucket]"),
    ] = None,
    cost: Annotated[int, typer.Option(metavar="N", help="The units that each call costs.")] = 1,
    count: Annotated[
        int, typer.Option(metavar="N", help="Call N times, one after another, and sum up.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Check a key by limits that are given here, and charge its cost. No rule applies.

    Needs a token with the role limit or admin, if the service requires one.

    Exit code: 0 allowed; 1 denied, or at least one of several was; 2 the call failed: no service,
    no token, or a cost that can never fit.

    Example: ratekeeper limit emails user:42 --limit 10/minute --limit 100/day

    Example: ratekeeper limit logins 192.0.2.1 --limit "5 in any minute"
    """
    body = {
        "name": name,
        "key": key[0] if len(key) == 1 else key,
        "limits": limits if algorithm is None else _with_algorithm(limits, algorithm),
        "cost": cost,
    }

    def ask() -> dict[str, Any]:
        return service.call("POST", "/v1/limit", body=body, expected="allowed")

    _check_often(service, count, ask, as_json)


def _with_algorithm(rates: list[str], algorithm: str) -> list[Any]:
    """Return the limits, each with the algorithm if it has none. Raises ConfigError."""
    if algorithm not in ALGORITHM_NAMES:
        raise ConfigError(
            f"--algorithm {algorithm} is unknown; use one of {', '.join(ALGORITHM_NAMES)}"
        )
    return [limit_data(each) for rate in rates for each in parse_limits(rate, algorithm=algorithm)]


def _check_often(
    service: ServiceClient,
    count: int,
    ask: Callable[[], dict[str, Any]],
    as_json: bool,
    *,
    peek: bool = False,
) -> NoReturn:
    """Check `count` times, print the result, and end the command with its exit code."""
    if not 1 <= count <= COUNT_MAX:
        raise ConfigError(f"--count {count} is not between 1 and {COUNT_MAX:,}")
    allowed = 0
    answer: dict[str, Any] = {}
    with service:
        for _ in range(count):
            answer = ask()
            allowed += bool(answer["allowed"])
    code = OK if allowed == count else PROBLEMS
    sums = {"count": count, "allowed": allowed, "denied": count - allowed}
    if as_json:
        print_json({"exit_code": code, **(answer if count == 1 else {**sums, "last": answer})})
    else:
        line = f"{'would be ' if peek else ''}{check_text(answer)}"
        if count > 1:
            line = f"allowed {allowed:,}, denied {count - allowed:,} of {count:,}; the last: {line}"
        print_text(line)
    raise typer.Exit(code)


def _check(service: ServiceClient, request: Mapping[str, Any], cost: int) -> dict[str, Any]:
    return service.call("POST", "/v1/check", body={**request, "cost": cost}, expected="allowed")


def _peek(service: ServiceClient, request: Mapping[str, Any], cost: int) -> dict[str, Any]:
    """Return the answer that a check would get, computed from the quota."""
    found = service.call("GET", "/v1/quota", query=_query(request), expected="rules")
    try:
        return {**found, **decision_from_quota(found, cost)}
    except (KeyError, TypeError):
        raise ServiceError(
            f"{service.url} answers, but this version of the command does not understand the answer"
        ) from None


def decision_from_quota(quota: Mapping[str, Any], cost: int) -> dict[str, Any]:
    """Return what a check with this cost would answer.

    `remaining` units would pass at this instant, so each limit is one comparison. Raises
    ConfigError for a cost that can never fit.
    """
    denied: list[str] = []
    shadow_denied: list[str] = []
    limits: list[dict[str, Any]] = []
    penalties: list[Mapping[str, Any]] = []
    for rule in json_objects(quota.get("rules")):
        shadowed = rule.get("mode") == "shadow"
        units = cost * int(rule.get("cost", 1))
        if isinstance(penalty := rule.get("penalty"), Mapping):
            penalties.append(penalty)
        for limit in json_objects(rule.get("limits")):
            if units > limit["remaining"]:
                (shadow_denied if shadowed else denied).append(str(rule["rule"]))
            if not shadowed:
                _expect_fits(cost, units, rule, limit)
                limits.append({**limit, "rule": rule["rule"]})
    # The tightest limit is the one with the least remaining.
    tightest = min(limits, key=lambda limit: int(limit["remaining"]), default={})
    names = ("rule", "limit", "remaining", "reset_after")
    decision = {
        "allowed": not denied and not penalties and quota.get("kind") != "blocked",
        **{name: tightest.get(name) for name in names},
        "shadow_denied": list(dict.fromkeys(shadow_denied)),
    }
    if penalties:
        longest = max(penalties, key=lambda penalty: float(penalty["retry_after"]))
        decision |= {"penalty": longest["kind"], "retry_after": longest["retry_after"]}
    return decision


def _expect_fits(cost: int, units: int, rule: Mapping[str, Any], limit: Mapping[str, Any]) -> None:
    if units > limit["limit"]:
        raise ConfigError(
            f"--cost {cost} takes {units:,} units of rule {rule['rule']}, which can never fit "
            f"{limit.get('policy')}: it holds at most {limit['limit']:,}"
        )


@with_options(request=request_fields, service=service_client)
def quota(request: dict[str, Any], service: ServiceClient, as_json: JsonOption = False) -> None:
    """Show the remaining quota of every limit that applies to a request. Charges nothing.

    Exit code: 0 shown; 2 the call failed.

    Example: ratekeeper quota --api-key sk_1 --endpoint /v1/orders/7 --method POST

    Example: ratekeeper quota --user 42 --attribute region=eu --json
    """
    with service:
        answer = service.call("GET", "/v1/quota", query=_query(request), expected="rules")
    rows = [
        _quota_row(rule, limit)
        for rule in json_objects(answer.get("rules"))
        for limit in json_objects(rule.get("limits"))
    ]
    if as_json:
        print_json({"exit_code": OK, **answer})
    elif rows:
        print_table(_HEADINGS, rows)
        for rule in json_objects(answer.get("rules")):
            if rule.get("regions") is not None:
                print_text(_regions_text(rule))
    else:
        print_text(_reason(answer))


@with_options(request=request_fields, service=service_client)
def reset(
    request: dict[str, Any],
    service: ServiceClient,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Restore the whole quota of a request's subjects, in every rule that applies to the request.

    Penalties end, too. Needs an admin token. The audit has the token's name and the reason.

    Exit code: 0 done; 2 not done.

    Example: ratekeeper reset --api-key sk_1 --endpoint /v1/orders/7 --reason "case 4711"
    """
    with service:
        service.call("DELETE", "/v1/quota", query=_query(request), reason=reason)
    if as_json:
        print_json({"exit_code": OK, "reset": request})
    else:
        print_text(f"reset: {_request_text(request)} has its whole quota again")


@with_options(request=request_fields, service=service_client)
def grant(
    request: dict[str, Any],
    service: ServiceClient,
    units: Annotated[int, typer.Option(metavar="N", help="How many units to grant.")],
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long they last: 90s, 10m, 1h. [default: one window of each limit]",
        ),
    ] = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Grant a request's subjects additional units for a while.

    Needs an admin token. The audit has the token's name and the reason.

    Exit code: 0 done; 2 not done.

    Example: ratekeeper grant --units 500 --ttl 1h --api-key sk_1 --endpoint /v1/orders/7
    """
    lifetime = {} if ttl is None else {"ttl_seconds": parse_duration_s("--ttl", ttl)}
    body = {**request, "units": units, **lifetime}
    with service:
        service.call("POST", "/v1/quota/grant", body=body, reason=reason)
    if as_json:
        print_json({"exit_code": OK, "granted": body})
    else:
        lasts = ttl or "one window of each limit"
        print_text(f"granted: {_request_text(request)} has {units:,} more units for {lasts}")


def _query(request: Mapping[str, Any]) -> dict[str, str]:
    query = {name: value for name, value in request.items() if name != "attributes"}
    attributes = request.get("attributes", {})
    return query | {f"attributes.{name}": value for name, value in attributes.items()}


# ── Printing ───────────────────────────────────────────────────────────────────────────────────


def check_text(answer: Mapping[str, Any]) -> str:
    """Return one line: allowed or denied, the reason, and when to retry."""
    parts = [_reason(answer)]
    if answer.get("delay"):
        parts.append(f"to be served after {seconds_text(answer['delay'])}")
    if not answer.get("allowed") and answer.get("retry_after"):
        parts.append(f"retry in {seconds_text(answer['retry_after'])}")
    if shadow := answer.get("shadow_denied"):
        parts.append(f"shadow rules would deny it: {', '.join(map(str, shadow))}")
    return f"{'allowed' if answer.get('allowed') else 'denied'}: {', '.join(parts)}"


def _reason(answer: Mapping[str, Any]) -> str:
    kind = answer.get("kind")
    if kind == "exempt":
        return "on the allow list"
    if kind == "blocked":
        return "on the deny list"
    if kind == "unlimited":
        return "no rule applies"
    rule = f" of rule {answer['rule']}" if answer.get("rule") else ""
    if kind == "unavailable" or answer.get("degraded"):
        return f"the store is unavailable, so the failure policy{rule} decides"
    if answer.get("penalty"):
        return f"{_penalty_text(answer['penalty'])}{rule}"
    return f"{_remaining_text(answer)} left{rule}"


def _penalty_text(kind: object) -> str:
    return {"cooldown": "a cool-down", "block": "a block"}.get(str(kind), f"a penalty ({kind})")


def _remaining_text(answer: Mapping[str, Any]) -> str:
    return f"{_count_text(answer.get('remaining'))} of {_count_text(answer.get('limit'))}"


def _count_text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _request_text(request: Mapping[str, Any]) -> str:
    """Return the fields of a request on one line."""
    flat = {name: value for name, value in request.items() if name != "attributes"}
    flat |= request.get("attributes", {})
    return ", ".join(f"{name} {value}" for name, value in flat.items()) or "an empty request"


def _quota_row(rule: Mapping[str, Any], limit: Mapping[str, Any]) -> tuple[str, ...]:
    shadow = " (shadow)" if rule.get("mode") == "shadow" else ""
    reset_after = limit.get("reset_after")
    penalty = rule.get("penalty")
    left = _remaining_text(limit)
    if limit.get("debt"):
        left += f", owes {_count_text(limit['debt'])}"
    if isinstance(penalty, Mapping):
        left += f" ({_penalty_text(penalty.get('kind'))})"
    return (
        f"{rule.get('rule', '?')}{shadow}",
        str(rule.get("subject") or "all"),
        str(limit.get("policy", "?")),
        override_origin(rule.get("source", "?"), rule.get("override")),
        left,
        "now" if reset_after == 0 else f"in {seconds_text(reset_after)}",
    )


def _regions_text(rule: Mapping[str, Any]) -> str:
    """Return the usage of a global rule on one line: of all regions, and each region's part."""
    used = ", ".join(
        f"{_count_text(limit.get('used'))} of {_count_text(limit.get('limit'))} used"
        for limit in json_objects(rule.get("limits"))
    )
    parts = [
        f"{part.get('region')} {_count_text(part.get('units'))} ({_age_text(part)})"
        for part in json_objects(rule.get("regions"))
    ]
    kind = rule.get("across_regions")
    return f"{rule.get('rule', '?')} in all regions ({kind}): {used}; {', '.join(parts) or 'none'}"


def _age_text(part: Mapping[str, Any]) -> str:
    age_s = part.get("age_seconds")
    return f"{seconds_text(age_s)} ago" if age_s else "now"


COMMANDS: Final = (check, limit, quota, reset, grant)
