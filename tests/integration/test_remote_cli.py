"""`ratekeeper check`, `quota`, `reset` and `grant` against a real `ratekeeper serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.stub_service import run
from tests.redis_servers.certificates import make_certificates
from tests.service_process import ServiceProcess, run_to_end

RULES = {
    "version": 1,
    "rules": [
        {
            "id": "users",
            "match": {"user": "*"},
            "by": ["user"],
            "limits": ["5/hour", "1000/day"],
        },
        {
            "id": "dear",
            "match": {"endpoint": "/v1/export", "api_key": "*"},
            "by": ["api_key"],
            "limits": ["10/hour"],
            "cost": 3,
        },
        {
            "id": "new",
            "match": {"endpoint": "/v1/export", "user": "*"},
            "by": ["user"],
            "limits": ["1/hour"],
            "mode": "shadow",
        },
        {
            "id": "regions",
            "match": {"attributes": {"region": "eu"}},
            "by": ["tenant"],
            "limits": ["2/hour"],
        },
    ],
    "allow": ["api_key:sk_internal_*"],
    "deny": ["api_key:sk_revoked_*"],
}


class ServiceAccess(NamedTuple):
    """The URL of a service, and two tokens."""

    url: str
    admin: str
    acme: str
    """For checks of one tenant."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceAccess]:
    """Start one service for all tests; each test uses its own users."""
    process = ServiceProcess(RULES)
    admin = created(process, "admin", "--role", "admin")
    acme = created(process, "acme", "--role", "check", "--scope", "tenant=acme")
    with process:
        yield ServiceAccess(process.url, admin, acme)


def created(service: ServiceProcess, *arguments: str) -> str:
    made = run("token", "create", *arguments, "--data", str(service.data), "--json")
    assert made.exit_code == 0, made.output
    secret: str = json.loads(made.output)["token"]
    return secret


def test_check_charges_and_denies(service: ServiceAccess) -> None:
    """Five of seven are allowed; the exit code and the line show it."""
    first = run("check", "--user", "ann", url=service.url, TOKEN=service.admin)
    assert (first.output, first.exit_code) == ("allowed: 4 of 5 left of rule users\n", 0)
    more = run("check", "--user", "ann", "--count", "6", url=service.url, TOKEN=service.admin)
    assert more.exit_code == 1
    assert more.output.startswith(
        "allowed 4, denied 2 of 6; the last: denied: 0 of 5 left of rule users, retry in "
    )
    answer = json.loads(
        run("check", "--user", "ann", "--json", url=service.url, TOKEN=service.admin).output
    )
    assert (answer["exit_code"], answer["allowed"], answer["kind"]) == (1, False, "limited")
    assert 0 < answer["retry_after"] <= 3_600


def test_peek_charges_nothing(service: ServiceAccess) -> None:
    """It answers as a check with the same cost would."""
    for _ in range(2):
        for cost, code in (("5", 0), ("6", 2)):
            peeked = run(
                "check",
                "--user",
                "ben",
                "--peek",
                "--cost",
                cost,
                url=service.url,
                TOKEN=service.admin,
            )
            assert peeked.exit_code == code, peeked.output
    spent = run("check", "--user", "ben", "--cost", "4", url=service.url, TOKEN=service.admin)
    assert spent.output == "allowed: 1 of 5 left of rule users\n"
    peeked = run(
        "check", "--user", "ben", "--peek", "--cost", "2", url=service.url, TOKEN=service.admin
    )
    assert (peeked.output, peeked.exit_code) == ("would be denied: 1 of 5 left of rule users\n", 1)


def test_quota_shows_every_rule_that_applies(service: ServiceAccess) -> None:
    """Each limit is a line, also in shadow mode; nothing is charged."""
    request = ["--user", "cyd", "--api-key", "sk_1", "--endpoint", "/v1/export"]
    run("check", *request, url=service.url, TOKEN=service.admin)
    for _ in range(2):
        shown = run("quota", *request, url=service.url, TOKEN=service.admin)
        assert shown.exit_code == 0
        names = [line.split()[0] for line in shown.output.splitlines()]
        assert names == ["RULE", "users", "users", "dear", "new"]
        assert " 4 of 5 " in shown.output.splitlines()[1]
    answer = json.loads(
        run("quota", *request, "--json", url=service.url, TOKEN=service.admin).output
    )
    remaining = {
        rule["rule"]: [limit["remaining"] for limit in rule["limits"]] for rule in answer["rules"]
    }
    assert remaining == {"users": [4, 999], "dear": [7], "new": [0]}


def test_shadow_rule_is_shown(service: ServiceAccess) -> None:
    """The request is allowed, and the line says that the rule would deny it."""
    request = ["--user", "dot", "--endpoint", "/v1/export"]
    run("check", *request, url=service.url, TOKEN=service.admin)
    peeked = run("check", "--peek", *request, url=service.url, TOKEN=service.admin)
    again = run("check", *request, url=service.url, TOKEN=service.admin)
    for each in (peeked, again):
        assert each.exit_code == 0
        assert each.output.endswith("shadow rules would deny it: new\n")


@pytest.mark.parametrize(
    ("arguments", "line", "code"),
    [
        (["--api-key", "sk_internal_1"], "allowed: on the allow list\n", 0),
        (["--api-key", "sk_revoked_1"], "denied: on the deny list\n", 1),
        (["--endpoint", "/other"], "allowed: no rule applies\n", 0),
        (
            ["--tenant", "acme", "--attribute", "region=eu"],
            "allowed: 1 of 2 left of rule regions\n",
            0,
        ),
    ],
)
def test_lists_and_attributes(
    arguments: list[str], line: str, code: int, service: ServiceAccess
) -> None:
    """The rules see the given fields."""
    result = run("check", *arguments, url=service.url, TOKEN=service.admin)
    assert (result.output, result.exit_code) == (line, code)


def test_explain_asks_the_service(service: ServiceAccess) -> None:
    """Without a file or a database: the answer has its rules, its lists and its counts."""
    url = "--url", service.url, "--token", service.admin
    run("check", "--user", "told", "--cost", "4", *url)
    done = run("rules", "explain", "--user", "told", *url)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"allowed ({service.url}, rules ")
    assert "allows, 1 of 5 left" in done.stdout
    done = run("rules", "explain", "--api-key", "sk_revoked_1", *url)
    assert done.stdout.startswith("denied: on the list: deny api_key:sk_revoked_* (")
    done = run("rules", "explain", "--user", "told", "--store", "memory://", *url)
    assert done.exit_code == 2
    assert "give a FILE or --database" in done.output


def test_reset_and_grant_change_the_quota(service: ServiceAccess) -> None:
    """They print what they did."""
    request = ["--user", "eve"]
    run("check", *request, "--cost", "5", url=service.url, TOKEN=service.admin)
    assert run("check", *request, url=service.url, TOKEN=service.admin).exit_code == 1
    done = run(
        "grant", *request, "--units", "2", "--ttl", "10m", url=service.url, TOKEN=service.admin
    )
    assert (done.output, done.exit_code) == ("granted: user eve has 2 more units for 10m\n", 0)
    checks = run("check", *request, "--count", "3", "--json", url=service.url, TOKEN=service.admin)
    assert json.loads(checks.output)["allowed"] == 2
    done = run("reset", *request, url=service.url, TOKEN=service.admin)
    assert (done.output, done.exit_code) == ("reset: user eve has its whole quota again\n", 0)
    assert "4 of 5 left" in run("check", *request, url=service.url, TOKEN=service.admin).output


def test_missing_and_insufficient_tokens(service: ServiceAccess) -> None:
    """No token, a wrong one, and one without the permission: exit code 2 and a remedy."""
    for command in (["check"], ["quota"], ["reset"], ["grant", "--units", "1"]):
        for token in ("", "rk_wrong"):
            refused = run(*command, "--user", "fay", url=service.url, TOKEN=token)
            assert refused.exit_code == 2
            assert "requires a token" in refused.stderr
            assert "RATEKEEPER_TOKEN" in refused.stderr
            assert "rk_wrong" not in refused.stderr
    assert run("check", "--user", "fay", url=service.url, TOKEN=service.acme).exit_code == 0
    for command in (["check", "--tenant", "other"], ["reset"], ["grant", "--units", "1"]):
        refused = run(*command, "--user", "fay", url=service.url, TOKEN=service.acme)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("ratekeeper: the token does not allow this: ")
        assert service.acme not in refused.output


def test_cost_that_can_never_fit_is_exit_code_2(service: ServiceAccess) -> None:
    """It is not a denial: waiting would not help."""
    result = run("check", "--user", "gus", "--cost", "9", url=service.url, TOKEN=service.admin)
    assert result.exit_code == 2
    assert "answers 422: " in result.stderr


def test_check_in_a_process(service: ServiceAccess) -> None:
    """With the URL and the token in the environment."""
    environment = {"RATEKEEPER_URL": service.url, "RATEKEEPER_TOKEN": service.admin}
    done = run_to_end(["check", "--user", "hal", "--json"], **environment)
    assert (done.returncode, json.loads(done.stdout)["remaining"]) == (0, 4), done.stderr


def test_tls_certificate_must_be_trusted(tmp_path: Path) -> None:
    """With --ca the call succeeds; without it, the token is not sent."""
    made = make_certificates(tmp_path)
    options = ("--tls-cert", str(made.server_cert_path), "--tls-key", str(made.server_key_path))
    with ServiceProcess(RULES, *options) as service:
        assert service.url.startswith("https://")
        trusted = run("check", "--user", "ida", url=service.url, CA=str(made.ca_path))
        assert (trusted.output, trusted.exit_code) == ("allowed: 4 of 5 left of rule users\n", 0)
        refused = run("check", "--user", "ida", url=service.url)
        assert refused.exit_code == 2
        assert "certificate verify failed" in refused.stderr
        assert "signed its certificate in --ca" in refused.stderr
