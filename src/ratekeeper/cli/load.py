"""`ratekeeper load`: push the load of the protected system to a service, and show the factors."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from ratekeeper.cli.common import (
    OK,
    CliCommand,
    CliGroup,
    JsonOption,
    parse_duration_s,
    print_json,
    print_table,
    print_text,
    seconds_text,
    with_options,
)
from ratekeeper.cli.service_client import ServiceClient, json_objects, service_client

app: Final = typer.Typer(
    cls=CliGroup,
    help="Push the load of the protected system, which limits follow, and show it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show secrets.
    pretty_exceptions_enable=False,
)

_PATH: Final = "/v1/admin/load"


@app.command(cls=CliCommand)
@with_options(service=service_client)
def push(
    service: ServiceClient,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The `source` that rules follow.")
    ],
    load: Annotated[
        float, typer.Argument(metavar="LOAD", help="The load; for `pushed`, from 0 to 1.")
    ],
    valid_for: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="DURATION",
            help="How long the load is valid. [default: the rule's stale_after]",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Push a load to every worker of a service; with Redis, to every node. Needs an admin token.

    Repeat it before the load is stale: then the base limits return.

    Exit code: 0 pushed; 2 the call failed.

    Example: ratekeeper load push queue_depth 340

    Example: ratekeeper load push queue_depth 340 --for 2m
    """
    body: dict[str, Any] = {"source": source, "load": load}
    if valid_for is not None:
        body["valid_for_seconds"] = parse_duration_s("--for", valid_for)
    with service:
        found = service.call("POST", _PATH, body=body, expected="rules")
    if as_json:
        print_json({"exit_code": OK, **found})
        return
    reached = "every node on the store" if found.get("nodes") else "the workers of this node"
    print_text(f"{source} is {load:g} for {reached}")
    _print_rules(found)


@app.command(cls=CliCommand)
@with_options(service=service_client)
def show(service: ServiceClient, as_json: JsonOption = False) -> None:
    """Show each load that rules follow, its age, and the factor of each rule.

    Exit code: 0 shown; 2 the call failed.

    Example: ratekeeper load show
    """
    with service:
        found = service.call("GET", _PATH, expected="rules")
    if as_json:
        print_json({"exit_code": OK, **found})
        return
    sources = json_objects(found.get("sources"))
    if not sources:
        print_text("no rule follows a load; add scale: {source: queue_depth, low: 100, high: 5000}")
        return
    rows = [
        (
            str(each.get("source")),
            "unknown" if each.get("load") is None else f"{each['load']:g}",
            "-" if each.get("age_seconds") is None else seconds_text(each["age_seconds"]),
        )
        for each in sources
    ]
    print_table(("SOURCE", "LOAD", "AGE"), rows)
    _print_rules(found)


def _print_rules(found: dict[str, Any]) -> None:
    rows = [
        (
            str(rule.get("id")),
            f"{rule.get('factor', 1.0):g}",
            ", ".join(
                f"{by.get('source')} {'stale' if by.get('stale') else by.get('factor')}"
                for by in json_objects(rule.get("by"))
            ),
        )
        for rule in json_objects(found.get("rules"))
    ]
    if rows:
        print_table(("RULE", "FACTOR", "BY"), rows)
