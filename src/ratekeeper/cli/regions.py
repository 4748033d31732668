"""`ratekeeper regions`: the regions that share global limits, and changes of their shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

import typer

from ratekeeper.cli.common import (
    OK,
    PROBLEMS,
    JsonOption,
    ReasonOption,
    parse_pairs,
    print_json,
    print_table,
    print_text,
    seconds_text,
    with_options,
)
from ratekeeper.cli.service_client import ServiceClient, json_objects, service_client
from ratekeeper.core.errors import ConfigError, show

Action = Literal["show", "add", "remove", "set"]

_PATH: Final = "/v1/admin/regions"
_ACTIONS: Final[tuple[Action, ...]] = ("show", "add", "remove", "set")
_HEADINGS: Final = (
    *("REGION", "LEADER", "SHARE", "LINKS", "LAG", "BACKLOG", "UNACCEPTED", "EXCESS", ""),
)
_NO_REGIONS: Final = (
    "this service has no regions; start it with --region and a table of regions (docs/regions.md)"
)


@with_options(service=service_client)
def regions(
    service: ServiceClient,
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="show, add, remove or set.")
    ] = "show",
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REGION...", help="The region to add or remove; for set, all: eu=0.4 us=0.6."
        ),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="For add: 0.2 or 1/5. [default: as much as a region has on average]",
        ),
    ] = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the regions that share global limits: leaders, links, shares. Or change the shares.

    LAG is the age of the oldest total not yet reported to another region. BACKLOG is the number
    of subjects with totals that not all other regions have accepted, UNACCEPTED their units. EXCESS
    are the units by which eventual limits were exceeded. Stop the nodes of a region before you
    remove it. To show needs a token with the role read, to change one with the role admin.

    Exit code: 0 shown or changed; 1 changed, but some region could not be reached yet; 2 the call
    failed, and nothing was changed.

    Example: ratekeeper regions

    Example: ratekeeper regions remove ap --reason "data centre closed"

    Example: ratekeeper regions add ap --share 0.2

    Example: ratekeeper regions set eu=0.4 us=0.4 ap=0.2 --reason "more clients in eu"
    """
    method, path, body = _call_of(action, names or [], share)
    with service:
        found = service.call(method, path, body=body, reason=reason, expected="regions")
    unreachable = found.get("unreachable") or {}
    code = PROBLEMS if unreachable else OK
    if as_json:
        print_json({"exit_code": code, **found})
    elif action == "show":
        _print_regions(found)
    else:
        _print_change(found, unreachable)
    raise typer.Exit(code)


def _call_of(
    action: str, names: Sequence[str], share: str | None
) -> tuple[str, str, dict[str, Any] | None]:
    """Return the method, the path and the body of the call. Raises ConfigError."""
    if action not in _ACTIONS:
        raise ConfigError(f"{show(action)} is unknown; use one of {', '.join(_ACTIONS)}")
    if share is not None and action != "add":
        raise ConfigError("--share belongs to `ratekeeper regions add`; set takes eu=0.4 us=0.6")
    if action == "show":
        if names:
            raise ConfigError("`ratekeeper regions show` shows all regions; leave out the names")
        return "GET", _PATH, None
    if action == "set":
        pairs = parse_pairs("set", names, "eu=0.4") if names else {}
        if not pairs:
            raise ConfigError("name the share of every region: eu=0.4 us=0.6")
        shares = {name: _number(name, text) for name, text in pairs.items()}
        return "PUT", _PATH, {"shares": shares}
    if len(names) != 1:
        raise ConfigError(f"name one region, for example `ratekeeper regions {action} us`")
    path = f"{_PATH}/{quote(names[0], safe='')}"
    if action == "remove":
        return "DELETE", path, None
    return "PUT", path, {} if share is None else {"share": _number(names[0], share)}


def _number(name: str, text: str) -> float:
    """Return a share that is written 0.2 or 1/5. Raises ConfigError.

    >>> _number("eu", "1/5")
    0.2
    """
    try:
        found = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        found = -1.0
    if not 0 < found <= 1:
        raise ConfigError(
            f"the share of {name} is {show(text)}; write a number above 0 and up to 1: 0.2 or 1/5"
        )
    return found


def _print_change(found: Mapping[str, Any], unreachable: Mapping[str, Any]) -> None:
    shares = ", ".join(f"{name} {_share_text(each)}" for name, each in found["shares"].items())
    print_text(f"the new shares: {shares}")
    for name, why in unreachable.items():
        print_text(f"{name} was not reached: {why}; it adopts the shares when it hears of them")
    _print_regions(found)


def _print_regions(found: Mapping[str, Any]) -> None:
    known = json_objects(found.get("regions"))
    if not known:
        print_text(_NO_REGIONS)
        return
    print_table(_HEADINGS, [_row(each) for each in known])
    for line in _problems(known):
        print_text(line)


def _row(region: Mapping[str, Any]) -> tuple[str, ...]:
    name, here = str(region.get("region")), "this region" if region.get("this_region") else ""
    age_s = region.get("age_seconds")
    if age_s is None:
        return (name, *["-"] * (len(_HEADINGS) - 2), here)
    links = [each for each in json_objects(region.get("links")) if each.get("state") != "removed"]
    up = sum(each.get("state") == "up" for each in links)
    lag_s = max((float(each.get("lag_seconds", 0)) for each in links), default=0.0)
    target = region.get("target_share")
    share = _share_text(region.get("share"))
    return (
        name,
        str(region.get("leader") or "none"),
        share if target is None else f"{share} to {_share_text(target)}",
        f"{up} of {len(links)} up",
        seconds_text(lag_s),
        *(f"{region.get(each, 0):,}" for each in ("backlog", "unaccepted_units", "excess_units")),
        here,
    )


def _problems(known: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each region and link that an operator should look at."""
    for region in known:
        name = region.get("region")
        if region.get("problem"):
            yield f"{name}: {region['problem']}"
        elif not region.get("leader"):
            yield f"{name}: no process leads; other regions do not learn what it admits"
        for link in json_objects(region.get("links")):
            if link.get("problem") or link.get("state") != "up":
                state = "" if link.get("state") == "up" else f"{link.get('state')}: "
                heard_s = link.get("heard_seconds")
                heard = (
                    "" if not state or heard_s is None else f" (heard {seconds_text(heard_s)} ago)"
                )
                yield f"{name} → {link.get('peer')}: {state}{link.get('problem')}{heard}"


def _share_text(share: object) -> str:
    return f"{share:.4g}" if isinstance(share, int | float) else "?"
