"""`ratekeeper load`: push the load, and show the factors."""

from __future__ import annotations

import json

import pytest

from tests.cli.stub_service import run, stub_service

LOAD = {
    "sources": [
        {"source": "jobs", "load": 340.0, "age_seconds": 1.5, "valid_for_seconds": None},
        {"source": "cpu", "load": None, "age_seconds": None, "valid_for_seconds": None},
    ],
    "rules": [
        {
            "id": "api",
            "factor": 0.6,
            "by": [
                {"source": "jobs", "factor": 0.6, "stale": False},
                {"source": "cpu", "factor": 1.0, "stale": True},
            ],
        }
    ],
}


def test_push() -> None:
    """The service gets the load and its validity; the output says whom it reaches."""
    with stub_service(200, {**LOAD, "nodes": True}) as service:
        found = run("load", "push", "jobs", "340", "--for", "2m", url=service.url, TOKEN="rk_1")
        assert found.exit_code == 0, found.output
        run("load", "push", "pushed", "0.5", url=service.url)
    assert [each.body for each in service.received] == [
        {"source": "jobs", "load": 340.0, "valid_for_seconds": 120.0},
        {"source": "pushed", "load": 0.5},
    ]
    assert {(each.method, each.target) for each in service.received} == {("POST", "/v1/admin/load")}
    assert found.output == (
        "jobs is 340 for every node on the store\n"
        "RULE  FACTOR  BY\n"
        "api   0.6     jobs 0.6, cpu stale\n"
    )


def test_show() -> None:
    """Each load with its age, and each rule with its factor."""
    with stub_service(200, LOAD) as service:
        found = run("load", "show", url=service.url)
        as_json = run("load", "show", "--json", url=service.url)
    assert found.output == (
        "SOURCE  LOAD     AGE\n"
        "jobs    340      1.5 s\n"
        "cpu     unknown  -\n"
        "RULE  FACTOR  BY\n"
        "api   0.6     jobs 0.6, cpu stale\n"
    )
    assert json.loads(as_json.output) == {"exit_code": 0, **LOAD}


def test_show_without_rules_that_follow_a_load() -> None:
    """The output says how a rule follows one."""
    with stub_service(200, {"sources": [], "rules": []}) as service:
        found = run("load", "show", url=service.url)
    assert "no rule follows a load; add scale: {source: queue_depth" in found.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["jobs", "many"], "Invalid value for 'LOAD'"),
        (["jobs", "340", "--for", "soon"], "--for 'soon' is not a duration; try 90s"),
        (["jobs"], "Missing argument 'LOAD'"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str) -> None:
    """Exit code 2, and the message names the argument."""
    with stub_service(200, LOAD) as service:
        found = run("load", "push", *arguments, url=service.url)
    assert found.exit_code == 2
    assert words in found.output
    assert not service.received


def test_a_rejection_of_the_service() -> None:
    """Its detail is printed."""
    with stub_service(400, {"detail": "no rule follows the load 'job'"}) as service:
        found = run("load", "push", "job", "1", url=service.url)
    assert (found.exit_code, "no rule follows the load 'job'" in found.output) == (2, True)
