"""The page Try a request: which rules apply to a request, which limit decides, and what remains.

The page asks `explain`, which spends nothing. The request is in the URL, so that it can be shared
and so that other pages can link to it. An API key is a secret and never part of a URL: with a key,
the answer to the form is the page itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute

from ratekeeper.service.console.client import ApiProblem
from ratekeeper.service.console.views import ROOT, Page, duration, number, url, view

PATH: Final = f"{ROOT}/try"
API_KEY: Final = "api_key"
# The fields of the form: name, label, example.
FIELDS: Final = (
    ("user", "User", "42"),
    ("tenant", "Tenant", "acme"),
    (API_KEY, "API key", "sk_…"),
    ("ip", "Address", "192.0.2.7"),
    ("tier", "Tier", "from the assignment"),
    ("endpoint", "Endpoint", "/orders"),
    ("method", "Method", "POST"),
)
# Servers and proxies reject longer URLs; a request that does not fit is sent as a form.
_URL_LENGTH_MAX: Final = 4_000


def routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    return [view("/try", show), view("/try", send, "POST", changes=False)]


async def show(page: Page) -> Response:
    """Show the form, and the explanation of the request in the URL."""
    given = {name: page.request.query_params.get(name, "") for name in _names() if name != API_KEY}
    return await _explained(page, given)


async def send(page: Page) -> Response:
    """Explain the request of the form: at its URL, unless it has a secret."""
    given = {name: page.form.get(name, "") for name in _names()}
    where = url(PATH, **{name: value for name, value in given.items() if name != API_KEY})
    if given[API_KEY] or len(where) > _URL_LENGTH_MAX:
        return await _explained(page, given)
    return RedirectResponse(where, 303)


def _names() -> list[str]:
    return [*(name for name, _, _ in FIELDS), "attributes", "cost"]


async def _explained(page: Page, given: Mapping[str, str]) -> Response:
    found, verdict, problem, status = None, None, None, 200
    if any(given.values()):
        try:
            found = (await page.api.call("POST", "/explain", data=request_of(given))).json()
            verdict = verdict_of(found)
        except InvalidRequest as error:
            status, problem = 422, page.problem(str(error))
        except ApiProblem as error:
            status, problem = error.status, page.problem_of(error)
    return page.render(
        "attempts.html",
        status,
        given={API_KEY: "", **given},
        fields=FIELDS,
        found=found,
        verdict=verdict,
        problem=problem,
    )


class InvalidRequest(Exception):
    """A field of the form cannot be part of a request."""


def request_of(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the request of the form, for the admin API. Raises InvalidRequest.

    >>> request_of({"user": "42", "attributes": "region=eu", "cost": "2"})
    {'user': '42', 'attributes': {'region': 'eu'}, 'cost': 2}
    """
    found: dict[str, Any] = {
        name: given[name] for name, _, _ in FIELDS if given.get(name, "") != ""
    }
    attributes: dict[str, str] = {}
    for at, line in enumerate(given.get("attributes", "").splitlines(), start=1):
        name, equals, value = line.partition("=")
        name = name.strip()
        if not line.strip():
            continue
        if not equals or not name:
            raise InvalidRequest(f"Attributes, line {at}: write name=value, for example region=eu.")
        if name in attributes:
            raise InvalidRequest(f"Attributes, line {at}: {name} is given twice; give it once.")
        attributes[name] = value.strip()
    if attributes:
        found["attributes"] = attributes
    cost = given.get("cost", "").strip()
    if cost:
        if not (cost.isascii() and cost.isdecimal() and len(cost) < 20):
            raise InvalidRequest("Cost: write a whole number of units, for example 1.")
        found["cost"] = int(cost)
    return found


def try_url(parts: Mapping[str, str]) -> str:
    """Return the link that fills the form with a request. An API key is left out.

    >>> try_url({"user": "a&b", "endpoint": "/orders", "api_key": "sk_1", "region": "eu"})
    '/console/try?user=a%26b&endpoint=%2Forders&attributes=region%3Deu'
    """
    known = {name for name, _, _ in FIELDS}
    others = "\n".join(f"{name}={value}" for name, value in parts.items() if name not in known)
    fields = {name: parts[name] for name, _, _ in FIELDS if name in parts and name != API_KEY}
    return url(PATH, **fields, attributes=others)


# ── The answer ─────────────────────────────────────────────────────────────────────────────────


class Verdict(NamedTuple):
    """The outcome of the request, and the rule that decides it."""

    kind: str
    """`allowed`, `denied` or `unknown`."""
    text: str
    rule: str | None = None


def verdict_of(found: Mapping[str, Any]) -> Verdict:
    """Return the verdict of an explanation in words."""
    kind = found["verdict"]
    if found["listed"]:
        name, _, entry = found["listed"].partition(" ")
        effect = "is denied" if name == "deny" else "is not limited"
        return Verdict(kind, f"It {effect}: {entry} is on the {name} list, before all rules.")
    rule = next((each for each in found["rules"] if each["id"] == found["decides"]), None)
    if rule is None:
        return Verdict(kind, "No enforced rule applies to it, so it is not limited.")
    if kind == "unknown":
        text = f"Rule {rule['id']} has no decision: {rule['error']}"
        return Verdict(kind, text, rule["id"])
    return Verdict(kind, _sentence(rule) if rule["decision"] else f"{rule['error']}", rule["id"])


def _sentence(rule: Mapping[str, Any]) -> str:
    decision = rule["decision"]
    if decision["penalty"]:
        kind = {"cooldown": "cool-down", "block": "block"}.get(decision["penalty"], "penalty")
        return (
            f"A {kind} of rule {rule['id']} denies it for {duration(decision['retry_after'])} more."
        )
    if not decision["allowed"]:
        return (
            f"Rule {rule['id']} denies it: {decision['policy']} has {number(decision['remaining'])}"
            f" of {number(decision['limit'])} left. It would pass in "
            f"{duration(decision['retry_after'])}."
        )
    return (
        f"Rule {rule['id']} has the least left: {number(decision['remaining'])} of "
        f"{number(decision['limit'])} under {decision['policy']}."
    )
