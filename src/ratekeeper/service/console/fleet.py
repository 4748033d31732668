"""The page Fleet and regions: the nodes, their leases, and the links between regions.

The page asks for its content again every few seconds. The whole content is one fragment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response
from starlette.routing import BaseRoute

from ratekeeper.service.console.client import ApiProblem
from ratekeeper.service.console.views import Page, Problem, view

NODES_PER_PAGE: Final = 100
ENVOYS_MAX: Final = 100
# How many nodes, regions and links a warning names.
_NAMED_MAX: Final = 5


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/fleet", show)]


async def show(page: Page) -> Response:
    """Show the page, or its content alone to htmx."""
    fleet = await page.api.get("/fleet")
    regions, problem = await _regions(page)
    nodes = in_order(fleet["nodes"])
    first = _first(page.query("from"), len(nodes))
    return page.render(
        "fleet_state.html" if page.is_partial else "fleet.html",
        fleet=fleet,
        nodes=nodes[first : first + NODES_PER_PAGE],
        first=first,
        page_size=NODES_PER_PAGE,
        envoys_max=ENVOYS_MAX,
        regions=regions,
        region_problem=problem,
        warnings=warnings_of(
            nodes, regions["regions"], fleet["registered_nodes"] - fleet["live_nodes"]
        ),
    )


async def _regions(page: Page) -> tuple[Mapping[str, Any], Problem | None]:
    """Return the regions. If they cannot be read, the page still shows the nodes."""
    try:
        return await page.api.get("/regions"), None
    except ApiProblem as error:
        return {"region": None, "regions": []}, page.problem_of(error)


def _first(given: str, count: int) -> int:
    """Return the place of the first node of a page; the last page if there are fewer nodes."""
    asked = int(given) if given.isdecimal() and len(given) < 10 else 0
    last_page = max(count - 1, 0) // NODES_PER_PAGE
    return min(asked // NODES_PER_PAGE, last_page) * NODES_PER_PAGE


def in_order(nodes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the nodes: this one, then those that are not alive, then the others by name.

    >>> found = [("b", "alive"), ("c", "dead"), ("a", "alive")]
    >>> listed = [{"node": name, "state": state, "this_node": False} for name, state in found]
    >>> [each["node"] for each in in_order(listed)]
    ['c', 'a', 'b']
    """
    return sorted(nodes, key=lambda it: (not it["this_node"], it["state"] == "alive", it["node"]))


def warnings_of(
    nodes: Sequence[Mapping[str, Any]], regions: Sequence[Mapping[str, Any]], unheard: int = 0
) -> list[str]:
    """Return the problems that an operator should look at first, as sentences.

    `unheard` is how many more nodes have registered in the store than this node hears.
    """
    found = []
    if unheard > 0:
        found.append(f"{unheard} more nodes have registered in the store than gossip here.")
    for state in ("suspected", "dead"):
        names = [each["node"] for each in nodes if each["state"] == state]
        if names:
            verb = "is" if len(names) == 1 else "are"
            found.append(f"{_listed(names)} {verb} {state}.")
    live = [each for each in nodes if each["state"] == "alive"]
    for field, what in (
        ("version", "run different versions of Ratekeeper"),
        ("rules_version", "have different rules in force"),
    ):
        counts = Counter(each[field] or "none" for each in live)
        if len(counts) > 1:
            shown = [f"{value} ({count})" for value, count in counts.most_common()]
            found.append(f"Nodes {what}: {_listed(shown)}.")
    for region in regions:
        name = region["region"]
        if region["problem"]:
            found.append(f"Region {name}: {region['problem']}.")
        elif region["leader"] is None:
            found.append(f"Region {name} has no leader, so its totals are not exchanged.")
        broken = [each["peer"] for each in region["links"] if each["state"] in {"down", "refused"}]
        if broken:
            found.append(f"Region {name} does not exchange totals with {_listed(broken)}.")
    return found


def _listed(names: Sequence[str]) -> str:
    """Return names in a sentence.

    >>> _listed(["a"]), _listed(["a", "b", "c"]), _listed(list("abcdefg"))
    ('a', 'a, b and c', 'a, b, c, d, e and 2 more')
    """
    shown, more = list(names[:_NAMED_MAX]), len(names) - _NAMED_MAX
    if more > 0:
        shown.append(f"{more} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
