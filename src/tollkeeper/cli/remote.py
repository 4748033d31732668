"""`tollkeeper check`, `quota`, `reset` and `grant`: asking a service that runs.

Who asks is given by options, which are the fields of a Request. `remote_service.py` asks, and
`remote_print.py` prints. Exit codes are those of `rules_print.py`: 0 allowed or done, 1 denied, 2
it could not be asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from tollkeeper.cli import remote_print
from tollkeeper.cli.remote_quota import verdict_of_quota
from tollkeeper.cli.remote_service import URL_DEFAULT, Service, Unanswered
from tollkeeper.cli.rules_explain import attributes_of
from tollkeeper.cli.rules_options import Command, JsonOption
from tollkeeper.cli.rules_print import OK, PROBLEMS, say, say_json, telling
from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.rates import UNIT_NS

COUNT_MAX: Final = 100_000
TIMEOUT_S: Final = 5.0
_TOKEN: Final = re.compile(r"\btk_[\w-]+")
_TIME: Final = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?P<unit>[a-z]{0,12})")

UserOption = Annotated[str | None, typer.Option("--user", metavar="TEXT", help="As in 42.")]
ApiKeyOption = Annotated[str | None, typer.Option("--api-key", metavar="TEXT", help="As in sk_1.")]
IpOption = Annotated[str | None, typer.Option("--ip", metavar="TEXT", help="As in 192.0.2.1.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", metavar="TEXT", help="As in acme.")]
TierOption = Annotated[
    str | None,
    typer.Option("--tier", metavar="TEXT", help="As in pro. [default: what is assigned]"),
]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", metavar="PATH", help="As in /v1/orders/7.")
]
MethodOption = Annotated[str | None, typer.Option("--method", metavar="NAME", help="As in POST.")]
AttributeOption = Annotated[
    list[str] | None,
    typer.Option("--attribute", metavar="K=V", help="Any other; may be given many times."),
]
UrlOption = Annotated[
    str,
    typer.Option("--url", envvar="TOLLKEEPER_URL", metavar="URL", help="Where the service is."),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="TOLLKEEPER_TOKEN",
        metavar="TEXT",
        help="The token, if the service wants one. Better in the variable, where nobody who lists "
        "the machine's processes sees it. It is never shown.",
    ),
]
CaOption = Annotated[
    str | None,
    typer.Option(
        "--ca",
        envvar="TOLLKEEPER_CA",
        metavar="FILE",
        help="The certificate that an https service's own is signed with. [default: the system's]",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long an answer may take.")
]


class RemoteCommand(Command):
    """A command that repeats no URL, and no token either."""

    def without_secrets(self, said: str) -> str:
        """A token may have been typed where something else belongs."""
        return _TOKEN.sub("a token", super().without_secrets(said))


def check(
    user: UserOption = None,
    api_key: ApiKeyOption = None,
    ip: IpOption = None,
    tenant: TenantOption = None,
    tier: TierOption = None,
    endpoint: EndpointOption = None,
    method: MethodOption = None,
    attribute: AttributeOption = None,
    cost: Annotated[int, typer.Option(metavar="N", help="The units that each one spends.")] = 1,
    count: Annotated[
        int, typer.Option(metavar="N", help="Ask so many times, one after another, and sum up.")
    ] = 1,
    peek: Annotated[
        bool, typer.Option("--peek", help="Only say whether it would pass; spend nothing.")
    ] = False,
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Ask whether a request may pass, and spend its cost if it may.

    Exit code: 0 allowed; 1 denied, or one of several; 2 it could not be asked: no service, no
    token, or a cost that can never fit.

    Example: tollkeeper check --api-key sk_1 --endpoint /v1/orders/7 --method POST

    Example: tollkeeper check --user 42 --cost 5 --peek

    Example: tollkeeper check --user 42 --count 20 --json
    """
    with telling(as_json):
        if not 1 <= count <= COUNT_MAX:
            raise ConfigError(f"--count {count} is not between 1 and {COUNT_MAX:,}")
        fields = _fields(user, api_key, ip, tenant, tier, endpoint, method, attribute)
        if peek and (count != 1 or cost < 0):
            raise ConfigError("--peek asks once, for a --cost from 0 up; leave out --count")
        body = {**fields, "cost": cost}
        allowed = 0
        answer: dict[str, Any] = {}
        with Service(url, token, timeout_s=timeout, ca_file=ca) as service:
            for _ in range(count):
                answer = _peeked(service, fields, cost) if peek else _checked(service, body)
                allowed += bool(answer["allowed"])
        code = OK if allowed == count else PROBLEMS
        several = {"count": count, "allowed": allowed, "denied": count - allowed}
        if as_json:
            said = answer if count == 1 else {**several, "last": answer}
            say_json({"exit_code": code, **said})
        else:
            remote_print.say_check(answer, several, would="would be " if peek else "")
        raise typer.Exit(code)


def _checked(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    return service.ask("POST", "/v1/check", body=body, expected="allowed")


def _peeked(service: Service, fields: Mapping[str, Any], cost: int) -> dict[str, Any]:
    """What a check would answer, worked out from the quota."""
    found = service.ask("GET", "/v1/quota", query=_query(fields), expected="rules")
    try:
        return {**found, **verdict_of_quota(found, cost)}
    except (KeyError, TypeError):
        raise Unanswered(
            f"{service.url} answers, but not as this version of the command understands it"
        ) from None


def quota(
    user: UserOption = None,
    api_key: ApiKeyOption = None,
    ip: IpOption = None,
    tenant: TenantOption = None,
    tier: TierOption = None,
    endpoint: EndpointOption = None,
    method: MethodOption = None,
    attribute: AttributeOption = None,
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Show what is left of every limit that a request meets. Nothing is spent.

    Exit code: 0 it is shown; 2 it could not be asked.

    Example: tollkeeper quota --api-key sk_1 --endpoint /v1/orders/7 --method POST

    Example: tollkeeper quota --user 42 --attribute region=eu --json
    """
    with telling(as_json):
        query = _query(_fields(user, api_key, ip, tenant, tier, endpoint, method, attribute))
        with Service(url, token, timeout_s=timeout, ca_file=ca) as service:
            answer = service.ask("GET", "/v1/quota", query=query, expected="rules")
        if as_json:
            say_json({"exit_code": OK, **answer})
        else:
            remote_print.say_quota(answer)


def reset(
    user: UserOption = None,
    api_key: ApiKeyOption = None,
    ip: IpOption = None,
    tenant: TenantOption = None,
    tier: TierOption = None,
    endpoint: EndpointOption = None,
    method: MethodOption = None,
    attribute: AttributeOption = None,
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Forget what a request's subjects have spent, under every rule that the request meets.

    Needs an admin token.

    Exit code: 0 it is done; 2 it is not.

    Example: tollkeeper reset --api-key sk_1 --endpoint /v1/orders/7 --method POST
    """
    with telling(as_json):
        fields = _fields(user, api_key, ip, tenant, tier, endpoint, method, attribute)
        with Service(url, token, timeout_s=timeout, ca_file=ca) as service:
            service.ask("DELETE", "/v1/quota", query=_query(fields))
        if as_json:
            say_json({"exit_code": OK, "reset": fields})
        else:
            say(f"reset: {remote_print.request_text(fields)} has its whole quota again")


def grant(
    units: Annotated[int, typer.Option(metavar="N", help="How many units to give.")],
    ttl: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long they last: 90s, 10m, 1h. [default: a window]"),
    ] = None,
    user: UserOption = None,
    api_key: ApiKeyOption = None,
    ip: IpOption = None,
    tenant: TenantOption = None,
    tier: TierOption = None,
    endpoint: EndpointOption = None,
    method: MethodOption = None,
    attribute: AttributeOption = None,
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Give a request's subjects units beyond their limits, for a while.

    Needs an admin token.

    Exit code: 0 it is done; 2 it is not.

    Example: tollkeeper grant --units 500 --ttl 1h --api-key sk_1 --endpoint /v1/orders/7
    """
    with telling(as_json):
        fields = _fields(user, api_key, ip, tenant, tier, endpoint, method, attribute)
        ttl_s = {} if ttl is None else {"ttl_seconds": _seconds(ttl)}
        body = {**fields, "units": units, **ttl_s}
        with Service(url, token, timeout_s=timeout, ca_file=ca) as service:
            service.ask("POST", "/v1/quota/grant", body=body)
        if as_json:
            say_json({"exit_code": OK, "granted": body})
        else:
            told = remote_print.request_text(fields)
            say(f"granted: {told} has {units:,} more for {ttl or 'a window of each limit'}")


def _fields(  # the request as the service takes it: what is not given is left out
    user: str | None,
    api_key: str | None,
    ip: str | None,
    tenant: str | None,
    tier: str | None,
    endpoint: str | None,
    method: str | None,
    attribute: Sequence[str] | None,
) -> dict[str, Any]:
    given = {
        "user": user,
        "api_key": api_key,
        "ip": ip,
        "tenant": tenant,
        "tier": tier,
        "endpoint": endpoint,
        "method": method,
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if attribute:
        fields["attributes"] = attributes_of(attribute)
    try:
        remote_print.request_text(fields).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "an argument has bytes in it that are not UTF-8, as no request has; is it typed right?"
        ) from None
    return fields


def _seconds(text: str) -> float:
    """A length of time as people write it: a number, and a unit if it is not seconds."""
    found = _TIME.fullmatch(text)
    unit_ns = UNIT_NS.get(found["unit"] or "s") if found else None
    if found is None or unit_ns is None:
        raise ConfigError(f"--ttl {show(text)} is not a length of time; try 90s, 10m or 1h")
    return float(found["number"]) * unit_ns / NS_PER_SECOND


def _query(fields: Mapping[str, Any]) -> dict[str, str]:
    query = {name: value for name, value in fields.items() if name != "attributes"}
    attributes = fields.get("attributes", {})
    return query | {f"attributes.{name}": value for name, value in attributes.items()}


COMMANDS: Final = (check, quota, reset, grant)
