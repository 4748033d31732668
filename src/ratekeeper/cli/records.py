"""`ratekeeper records`: query the decisions and the usage that a service has recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from ratekeeper.cli.common import (
    OK,
    TIME_FORMS,
    CliCommand,
    CliGroup,
    JsonOption,
    parse_period,
    print_json,
    print_table,
    print_text,
    with_options,
)
from ratekeeper.cli.service_client import (
    ServiceClient,
    json_objects,
    one_line,
    service_client,
)

app: Final = typer.Typer(
    cls=CliGroup,
    help="Query recorded decisions and usage. It needs a token with the role read or admin.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show secrets.
    pretty_exceptions_enable=False,
)

_TEXT_MAX: Final = 60

RuleOption = Annotated[
    str | None, typer.Option("--rule", metavar="RULE", help="Only of this rule.")
]
OutcomeOption = Annotated[
    str | None,
    typer.Option(
        "--outcome",
        metavar="allowed|denied|shadow_denied|excess",
        help="shadow_denied: a rule in shadow mode would have denied; --rule is then that rule. "
        "excess: regions together were above an eventual limit.",
    ),
]
RegionOption = Annotated[
    str | None, typer.Option("--region", metavar="NAME", help="Only of the nodes of this region.")
]
SubjectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--subject",
        metavar="FIELD:VALUE",
        help="The subject as the rule counts it; repeat the option for each of its parts.",
    ),
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="TIME",
        help=f"{TIME_FORMS}. [default: the last day]",
    ),
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="TIME", help="The end. [default: now]")
]
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", help="The most rows to print.")]


@app.command(cls=CliCommand)
@with_options(service=service_client)
def decisions(
    service: ServiceClient,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="The tenant of the request.")
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="The user of the request.")
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option("--request-id", metavar="ID", help="The X-Request-Id of the reply."),
    ] = None,
    subject: SubjectOption = None,
    rule: RuleOption = None,
    outcome: OutcomeOption = None,
    region: RegionOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> None:
    """List single decisions, the newest first: every denial, and a sample of the rest.

    Exit code: 0 shown; 2 the call failed.

    Example: ratekeeper records decisions --tenant initech --outcome denied

    Example: ratekeeper records decisions --request-id 5f0c1e-2a --json

    Example: ratekeeper records decisions --outcome shadow_denied --rule trial --from 2026-11-15
    """
    asked = {"tenant": tenant, "user": user, "request_id": request_id, "outcome": outcome}
    query = _query(subject=subject, rule=rule, **asked, region=region, limit=str(limit))
    answer = _called(service, "/v1/admin/decisions", query, from_, to)
    _print(answer, as_json, _DECISION_HEADINGS, _decision)


@app.command(cls=CliCommand)
@with_options(service=service_client)
def usage(
    service: ServiceClient,
    subject: SubjectOption = None,
    rule: RuleOption = None,
    outcome: OutcomeOption = None,
    region: RegionOption = None,
    step: Annotated[
        str, typer.Option("--step", metavar="minute|hour|day", help="The length of a row.")
    ] = "hour",
    from_: FromOption = None,
    to: ToOption = None,
    limit: LimitOption = 100,
    as_json: JsonOption = False,
) -> None:
    """Show the usage of subjects by time: allowed and denied requests, and units.

    INDIRECT counts denials of the subject by a rule that counts something else.

    Exit code: 0 shown; 2 the call failed.

    Example: ratekeeper records usage --subject tenant:initech --step day --from 2026-11-01
    """
    asked = {"outcome": outcome, "region": region, "step": step, "limit": str(limit)}
    query = _query(subject=subject, rule=rule, **asked)
    answer = _called(service, "/v1/admin/usage", query, from_, to)
    _print(answer, as_json, _USAGE_HEADINGS, _usage)


@app.command(cls=CliCommand)
@with_options(service=service_client)
def top(
    service: ServiceClient,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="checks|denied|shadow_denied",
            help="shadow_denied: who would be denied most if rules in shadow mode were enforced.",
        ),
    ] = "checks",
    rule: RuleOption = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help=f"Count the records since then: {TIME_FORMS}. [default: the last minutes]",
        ),
    ] = None,
    to: ToOption = None,
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> None:
    """List the subjects with the most checks or denials.

    Exit code: 0 shown; 2 the call failed.

    Example: ratekeeper records top --by shadow_denied --rule trial --from 2026-11-01
    """
    query = _query(by=by, rule=rule, limit=str(limit))
    answer = _called(service, "/v1/admin/top", query, from_, to)
    _print(answer, as_json, _TOP_HEADINGS, _busy)


def _query(**given: str | Sequence[str] | None) -> dict[str, str | Sequence[str]]:
    return {name: value for name, value in given.items() if value}


def _called(
    service: ServiceClient,
    path: str,
    query: dict[str, str | Sequence[str]],
    from_: str | None,
    to: str | None,
) -> dict[str, Any]:
    period = parse_period(("--from", "--to"), from_, to)
    query |= {n: time.isoformat() for n, time in zip(("from", "to"), period, strict=True) if time}
    with service:
        return service.call("GET", path, query=query, expected="items")


def _print(answer: Mapping[str, Any], as_json: bool, headings: Sequence[str], cells: Any) -> None:
    if as_json:
        print_json({"exit_code": OK, **answer})
        return
    rows = [cells(each) for each in json_objects(answer.get("items"))]
    if not rows:
        print_text("no records match")
        return
    print_table(headings, rows)
    if answer.get("next"):
        print_text("there are more; raise --limit, or narrow the period", to_stderr=True)


_DECISION_HEADINGS: Final = (
    *("TIME", "OUTCOME", "RULE", "SUBJECT", "TENANT", "USER", "COUNT", "LIMIT", "WINDOW"),
    *("REQUEST ID", "NODE", "REGION", "SHADOW"),
)
_USAGE_HEADINGS: Final = (
    *("START", "SECONDS", "SUBJECT", "RULE", "ALLOWED", "DENIED", "INDIRECT", "SHADOW", "UNITS"),
    "REGION",
)
_TOP_HEADINGS: Final = ("SUBJECT", "RULE", "REQUESTS", "/S")


def _decision(each: Mapping[str, Any]) -> list[str]:
    identity = each.get("identity")
    who = identity if isinstance(identity, dict) else {}
    window = each.get("window")
    return [
        *(_text(each.get("time")), _text(each.get("outcome")), _text(each.get("rule"))),
        *(_parts(each.get("subject")), _text(who.get("tenant")), _text(who.get("user"))),
        *(_text(each.get("count")), _text(each.get("limit"))),
        f"{window:g} s" if isinstance(window, int | float) else "-",
        *(_text(each.get(name)) for name in ("request_id", "node", "region")),
        _parts(each.get("shadow_denied")),
    ]


def _usage(each: Mapping[str, Any]) -> list[str]:
    names = ("allowed", "denied", "denied_indirectly", "shadow_denied", "units")
    return [
        *(_text(each.get("start")), _text(each.get("seconds"))),
        *(_parts(each.get("subject")), _text(each.get("rule"))),
        *(_text(each.get(name)) for name in names),
        _text(each.get("region")),
    ]


def _busy(each: Mapping[str, Any]) -> list[str]:
    count = each.get("count")
    if isinstance(count, float):  # an estimate; halved every minute, it has fractions
        count = math.ceil(count)
    return [
        *(_parts(each.get("subject")), _text(each.get("rule"))),
        *(_text(count), _text(each.get("per_second"))),
    ]


def _parts(value: object) -> str:
    parts = value if isinstance(value, list) else []
    return _text(", ".join(map(str, parts)))


def _text(value: object) -> str:
    """Return a value of the answer as one line; "-" if there is none."""
    if isinstance(value, float):  # a rate
        value = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None or value == "" else one_line(str(value))[:_TEXT_MAX]
