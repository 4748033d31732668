"""`ratekeeper regions`: the status of regions, and changes of their shares."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.stub_service import run, stub_service

EU: dict[str, Any] = {
    "region": "eu",
    "this_region": True,
    "leader": "eu-1/4711",
    "age_seconds": 0.4,
    "problem": "",
    "epoch": 3,
    "share": 0.4,
    "target_share": None,
    "backlog": 1_200,
    "unaccepted_units": 40,
    "excess_units": 7,
    "links": [
        {"peer": "us", "state": "up", "problem": "", "lag_seconds": 0.25, "heard_seconds": 0.1},
        {
            "peer": "ap",
            "state": "down",
            "problem": "no answer within 1 s",
            "lag_seconds": 8.5,
            "heard_seconds": 9.0,
        },
    ],
}
US = {
    **EU,
    "region": "us",
    "this_region": False,
    "leader": None,
    "target_share": 0.5,
    "links": [{"peer": "eu", "state": "up", "problem": "its clock is 2 s ahead"}],
}
AP = {"region": "ap", "age_seconds": None, "problem": "no answer within 2 s", "links": []}
REGIONS: dict[str, Any] = {"region": "eu", "regions": [EU, US, AP]}


def test_the_regions_and_what_is_wrong_with_them() -> None:
    """A row for each region, then a line for each problem."""
    with stub_service(200, REGIONS) as service:
        found = run("regions", url=service.url, TOKEN="rk_1")
    assert found.exit_code == 0, found.output
    assert [(each.method, each.target) for each in service.received] == [
        ("GET", "/v1/admin/regions")
    ]
    assert found.output == (
        "REGION  LEADER     SHARE       LINKS      LAG    BACKLOG  UNACCEPTED  EXCESS\n"
        "eu      eu-1/4711  0.4         1 of 2 up  8.5 s  1,200    40          7       "
        "this region\n"
        "us      none       0.4 to 0.5  1 of 1 up  0 s    1,200    40          7\n"
        "ap      -          -           -          -      -        -           -\n"
        "eu → ap: down: no answer within 1 s (heard 9 s ago)\n"
        "us: no process leads; other regions do not learn what it admits\n"
        "us → eu: its clock is 2 s ahead\n"
        "ap: no answer within 2 s\n"
    )


def test_json_is_the_answer_of_the_service() -> None:
    """Programs get every field."""
    with stub_service(200, REGIONS) as service:
        found = run("regions", "--json", url=service.url)
    assert json.loads(found.output) == {"exit_code": 0, **REGIONS}


def test_a_service_without_regions() -> None:
    """The command says how to start one with regions."""
    with stub_service(200, {"region": None, "regions": []}) as service:
        found = run("regions", url=service.url)
    assert found.exit_code == 0
    assert "start it with --region" in found.output


CHANGED = {**REGIONS, "shares": {"eu": 0.5, "us": 0.5}, "unreachable": {}}


@pytest.mark.parametrize(
    ("arguments", "method", "path", "body"),
    [
        (["remove", "ap"], "DELETE", "/v1/admin/regions/ap", None),
        (["add", "ap", "--share", "1/5"], "PUT", "/v1/admin/regions/ap", {"share": 0.2}),
        (["add", "a/b"], "PUT", "/v1/admin/regions/a%2Fb", {}),
        (
            ["set", "eu=0.5", "us=1/2"],
            "PUT",
            "/v1/admin/regions",
            {"shares": {"eu": 0.5, "us": 0.5}},
        ),
    ],
)
def test_a_change_is_one_call(
    arguments: list[str], method: str, path: str, body: dict[str, Any] | None
) -> None:
    """With the reason in a header, and the new shares in the output."""
    with stub_service(200, CHANGED) as service:
        found = run("regions", *arguments, "--reason", "moved", url=service.url)
    assert found.exit_code == 0, found.output
    (sent,) = service.received
    assert (sent.method, sent.target) == (method, path)
    assert (sent.body, sent.reason) == (body, "moved")
    assert found.output.startswith("the new shares: eu 0.5, us 0.5\n")


def test_a_region_that_was_not_reached_is_named() -> None:
    """The exit code is 1: the change is written, and not in force everywhere."""
    answer = {**CHANGED, "unreachable": {"us": "no answer within 2 s"}}
    with stub_service(200, answer) as service:
        found = run("regions", "remove", "ap", url=service.url)
    assert found.exit_code == 1
    assert "us was not reached: no answer within 2 s; it adopts" in found.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["delete", "us"], "use one of show, add, remove, set"),
        (["remove"], "name one region"),
        (["remove", "us", "ap"], "name one region"),
        (["show", "us"], "shows all regions"),
        (["set"], "share of every region"),
        (["set", "eu"], "eu=0.4"),
        (["set", "eu=x"], "0.2 or 1/5"),
        (["set", "eu=1/0"], "0.2 or 1/5"),
        (["set", "eu=nan"], "0.2 or 1/5"),
        (["set", "eu=1.5"], "0.2 or 1/5"),
        (["remove", "us", "--share", "0.2"], "regions add"),
    ],
)
def test_wrong_arguments_make_no_call(arguments: list[str], says: str) -> None:
    """The error says what is right."""
    with stub_service(200, CHANGED) as service:
        found = run("regions", *arguments, url=service.url)
    assert found.exit_code == 2
    assert says in found.output
    assert not service.received
