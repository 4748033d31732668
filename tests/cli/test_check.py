"""`ratekeeper check`, `quota`, `reset` and `grant`: their requests, output and exit codes.

A stub answers here, also with answers that no service gives. tests/integration/test_remote_cli.py
uses a real service.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.cli.check import check_text
from tests.cli.stub_service import ALLOWED, DENIED, ReceivedRequest, run, stub_service
from tests.redis_servers.ports import free_port

COMMANDS = ("check", "limit", "quota", "reset", "grant")
TOKEN = "rk_s3cret"

# -------------------------------------------------------------------------------------------- limit


def test_limits_are_sent_with_the_call() -> None:
    """As rates, also with an algorithm; several words are the parts of a key."""
    with stub_service(200, ALLOWED) as service:
        result = run("limit", "emails", "user:42", "--limit", "10/minute", url=service.url)
        assert (result.output, result.exit_code) == ("allowed: 73 of 100 left of rule orders\n", 0)
        logged = [
            "--limit",
            "5/minute; 9 in any hour",
            "--algorithm",
            "leaky_bucket",
            "--cost",
            "2",
        ]
        run("limit", "logins", "acme", "192.0.2.1", *logged, "--count", "2", url=service.url)
    full = ["5/minute leaky_bucket", "9 in any hour"]
    one = {"name": "emails", "key": "user:42", "limits": ["10/minute"], "cost": 1}
    two = {"name": "logins", "key": ["acme", "192.0.2.1"], "limits": full, "cost": 2}
    assert [each.body for each in service.received] == [one, two, two]
    assert {each.target for each in service.received} == {"/v1/limit"}


def test_a_denial_by_a_given_limit_is_exit_code_1() -> None:
    """As of a check."""
    with stub_service(429, DENIED) as service:
        assert run("limit", "a", "b", "--limit", "1/s", url=service.url).exit_code == 1


def test_an_unknown_algorithm_is_exit_code_2() -> None:
    """The message lists those that exist; no request is made."""
    result = run("limit", "a", "b", "--limit", "1/s", "--algorithm", "magic", url="http://x")
    assert result.exit_code == 2
    assert "use one of token_bucket, leaky_bucket" in result.stderr


# -------------------------------------------------------------------------------------------- check


def test_allowed_is_exit_code_0_and_denied_is_1() -> None:
    """A script can use the exit code; the line says what is left and when to retry."""
    with stub_service(200, ALLOWED) as service:
        result = run("check", "--user", "42", url=service.url)
        assert (result.output, result.exit_code) == ("allowed: 73 of 100 left of rule orders\n", 0)
    with stub_service(429, DENIED) as service:
        result = run("check", "--user", "42", url=service.url)
        line = "denied: 0 of 100 left of rule orders, retry in 0.25 s\n"
        assert (result.output, result.exit_code) == (line, 1)


def test_fields_of_the_request() -> None:
    """A field that was not given is not sent: rules may match requests without it."""
    with stub_service(200, ALLOWED) as service:
        fields = ["--user", "42", "--api-key", "sk_1", "--ip", "::1", "--tenant", "acme"]
        fields += ["--tier", "pro", "--endpoint", "/v1/a", "--method", "POST"]
        fields += ["--attribute", "region=eu", "--attribute", "plan=a=b"]
        run("check", *fields, "--cost", "3", url=service.url)
        run("check", url=service.url)
    whole = {
        "user": "42",
        "api_key": "sk_1",
        "ip": "::1",
        "tenant": "acme",
        "tier": "pro",
        "endpoint": "/v1/a",
        "method": "POST",
        "attributes": {"region": "eu", "plan": "a=b"},
        "cost": 3,
    }
    assert service.received == [
        ReceivedRequest("POST", "/v1/check", None, whole),
        ReceivedRequest("POST", "/v1/check", None, {"cost": 1}),
    ]


def test_json_is_the_answer_with_the_exit_code() -> None:
    """For several checks: the sums and the last answer."""
    with stub_service(429, DENIED) as service:
        result = run("check", "--user", "42", "--json", url=service.url)
        assert json.loads(result.output) == {"exit_code": 1, **DENIED}
        result = run("check", "--user", "42", "--json", "--count", "3", url=service.url)
        sums = {"exit_code": 1, "count": 3, "allowed": 0, "denied": 3}
        assert json.loads(result.output) == {**sums, "last": DENIED}
    assert len(service.received) == 4


def test_several_checks_are_summed_up() -> None:
    """The line has the number of allowed checks and the last answer."""
    with stub_service(200, ALLOWED) as service:
        result = run("check", "--count", "3", url=service.url)
    line = "allowed 3, denied 0 of 3; the last: allowed: 73 of 100 left of rule orders\n"
    assert (result.output, result.exit_code) == (line, 0)


LEFT = "73 of 100 left of rule orders"
POLICY = "the store is unavailable, so the failure policy of rule orders decides"
CLOSED = {"kind": "unavailable", "allowed": False, "degraded": True, "retry_after": 1.0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "unlimited"}, "allowed: no rule applies"),
        ({"kind": "exempt"}, "allowed: on the allow list"),
        ({"kind": "blocked", "allowed": False}, "denied: on the deny list"),
        (CLOSED, f"denied: {POLICY}, retry in 1 s"),
        ({"degraded": True}, f"allowed: {POLICY}"),
        ({"delay": 1.5}, f"allowed: {LEFT}, to be served after 1.5 s"),
        (
            {"shadow_denied": ["a", "b"]},
            f"allowed: {LEFT}, shadow rules would deny it: a, b",
        ),
        ({"allowed": False, "retry_after": 1234.5}, f"denied: {LEFT}, retry in 1,234 s"),
    ],
)
def test_text_of_each_kind_of_answer(changes: dict[str, object], line: str) -> None:
    """The line gives the reason."""
    assert check_text({**ALLOWED, **changes}) == line


def test_incomplete_answer_is_printed() -> None:
    """A service of another version may omit members."""
    assert check_text({"allowed": False}) == "denied: ? of ? left"


# ---------------------------------------------------------------------------------- reset, grant


def test_reset_and_grant() -> None:
    """They print what was done, and send the request in the form that the service expects."""
    with stub_service(204, b"") as service:
        request = ["--user", "42", "--attribute", "region=e u"]
        done = run("reset", *request, url=service.url)
        assert (done.output, done.exit_code) == (
            "reset: user 42, region e u has its whole quota again\n",
            0,
        )
        done = run("grant", *request, "--units", "5000", "--ttl", "1.5h", url=service.url)
        assert done.output == "granted: user 42, region e u has 5,000 more units for 1.5h\n"
        done = run("grant", "--user", "42", "--units", "5", "--json", url=service.url)
        assert json.loads(done.output) == {"exit_code": 0, "granted": {"user": "42", "units": 5}}
    attributes = {"region": "e u"}
    grant = {"user": "42", "attributes": attributes, "units": 5000, "ttl_seconds": 5400.0}
    assert service.received == [
        ReceivedRequest("DELETE", "/v1/quota?user=42&attributes.region=e+u", None, None),
        ReceivedRequest("POST", "/v1/quota/grant", None, grant),
        ReceivedRequest("POST", "/v1/quota/grant", None, {"user": "42", "units": 5}),
    ]


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("arguments", [["check"], ["quota"], ["reset"], ["grant", "--units", "1"]])
def test_unreachable_service(arguments: list[str]) -> None:
    """Exit code 2 and how to start one; with --json, as a document."""
    url = f"http://127.0.0.1:{free_port()}"
    result = run(*arguments, "--url", url)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"ratekeeper: {url} cannot be reached (")
    assert "`ratekeeper serve`" in result.stderr
    assert "RATEKEEPER_URL" in result.stderr
    result = run(*arguments, "--url", url, "--json")
    assert json.loads(result.stdout)["exit_code"] == 2


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            401,
            {"detail": "no token"},
            "requires a token: no token. Give it in RATEKEEPER_TOKEN",
        ),
        (
            403,
            {"detail": "tenant must be acme"},
            "the token does not allow this: tenant must be acme",
        ),
        (422, {"title": "never fits", "status": 422}, "answers 422: never fits"),
        (400, {"detail": "a\x1b[31m\nb" + "c" * 10_000}, "answers 400: a [31m bccc"),
        (404, b"<html>", "answers 404, but not as Ratekeeper does"),
        (200, b"hello", "answers 200, but not as Ratekeeper does"),
        (200, b"[" * 100_000, "answers 200, but not as Ratekeeper does"),
        (200, {"colour": "red"}, "answers 200, but not as Ratekeeper does"),
        (200, [ALLOWED], "answers 200, but not as Ratekeeper does"),
        (200, b"", "answers 200, but not as Ratekeeper does"),
        (503, b"", "answers 503, but not as Ratekeeper does"),
        (200, b"x" * 5_000_000, "sent more than 4,194,304 bytes"),
    ],
)
def test_other_answers_are_exit_code_2(status: int, body: object, words: str) -> None:
    """The message is one short line without escapes, for any content of the answer."""
    with stub_service(status, body) as service:
        result = run("check", "--user", "42", url=service.url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1_000
    assert "\x1b" not in result.stderr


def test_redirect_is_not_followed() -> None:
    """The token would be sent to another server."""
    with stub_service(200, ALLOWED) as other, stub_service(301, b"", location=other.url) as service:
        result = run("check", "--user", "42", url=service.url, TOKEN=TOKEN)
    assert result.exit_code == 2
    assert f"redirects to {other.url}; give that as --url" in result.stderr
    assert other.received == []


def test_timeout() -> None:
    """A service that does not answer is given up after --timeout, or RATEKEEPER_TIMEOUT."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_port}"  # it listens, but accepts no connection
        result = run("check", "--timeout", "0.05", url=url)
        by_variable = run("check", url=url, TIMEOUT="0.05")
    assert (result.exit_code, by_variable.exit_code) == (2, 2)
    assert result.stderr == by_variable.stderr
    assert result.stderr == (
        f"ratekeeper: {url} did not answer within 0.05 s; raise --timeout to wait longer\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "--url", "localhost:8080"], "--url is not an http or https URL"),
        (["check", "--url", "http://a:s3cret@h"], "with the token in RATEKEEPER_TOKEN"),
        (["check", "--url", "http://h:s3cret"], "--url is not an http or https URL"),
        (["check", "--url", "https://h", "--ca", "gone.pem"], "--ca 'gone.pem' cannot be used: No"),
        (["check", "--timeout", "0"], "--timeout 0 is not between"),
        (["check", "--timeout", "nan"], "--timeout nan is not between"),
        (["check", "--count", "0"], "--count 0 is not between 1 and 100,000"),
        (["check", "--attribute", "region"], "is not NAME=VALUE; try region=eu"),
        (["quota", "--attribute", "a=1", "--attribute", "a=2"], "'a' is given twice"),
        (["check", "--token", "rk_s3cret twice"], "characters that no token has"),
        (["grant", "--units", "1", "--ttl", "1 fortnight"], "try 90s, 10m or 1h"),
        (["grant"], "--units"),
        (["check", "--user", "\udcff"], "is not valid UTF-8"),
        (["quota", "--attribute", "region=\udcff"], "is not valid UTF-8"),
        (["check", "rk_s3cret"], "unexpected extra argument(s) (a token)"),
        (["check", "http://a:s3cret@h"], "unexpected extra argument(s) a URL"),
        (["check", "--cost", "rk_s3cret"], "Invalid value for '--cost'"),
    ],
)
def test_wrong_arguments_are_exit_code_2_without_secrets(arguments: list[str], words: str) -> None:
    """The message says what is wrong and what would be right."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "s3cret" not in result.output
    assert "Traceback" not in result.output


def test_token_is_sent_and_never_printed() -> None:
    """The token is in no answer, error or help, from the variable and from the option."""
    shown = []
    with stub_service(200, ALLOWED) as service:
        shown += [run("check", url=service.url, TOKEN=TOKEN)]
        shown += [run("check", "--token", TOKEN, "--json", url=service.url)]
    assert [each.authorization for each in service.received] == [f"Bearer {TOKEN}"] * 2
    with stub_service(401, b"") as service:
        shown += [run("check", *more, url=service.url, TOKEN=TOKEN) for more in ([], ["--json"])]
    shown += [run("check", "--help", TOKEN=TOKEN)]
    assert [each.exit_code for each in shown] == [0, 0, 2, 2, 0]
    for each in shown:
        assert "s3cret" not in each.output


def test_proxy_is_not_used_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy could not reach the loopback address of this machine."""
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with stub_service(200, ALLOWED) as service:
        assert run("check", url=service.url).exit_code == 0


def test_without_httpx() -> None:
    """The message says what to install."""
    program = (
        "import sys; sys.modules['httpx'] = None; sys.argv = ['ratekeeper', *{!r}]\n"
        "from ratekeeper.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program.format(["check"])],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "pip install 'ratekeeper[client]'" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------- quota, peek


def limit(remaining: int, capacity: int = 10, reset_after: float = 1.0) -> dict[str, Any]:
    policy = f"{capacity}/second"
    return {
        "policy": policy,
        "limit": capacity,
        "remaining": remaining,
        "reset_after": reset_after,
    }


def rule(name: str, *limits: dict[str, Any], mode: str = "enforce", cost: int = 1) -> Any:
    return {
        "rule": name,
        "mode": mode,
        "subject": "user:42",
        "source": "tier pro",
        "cost": cost,
        "limits": list(limits),
    }


QUOTA = {
    "kind": "limited",
    "rules": [
        rule("all", limit(7), limit(100, 100, 0.0)),
        rule("new", limit(1, 5), mode="shadow"),
        {
            **rule("dear", limit(12, 20), cost=3),
            "override": {"id": "a", "reason": "launch", "until": "2030-01-31T00:00:00Z"},
        },
    ],
}


def test_quota_has_a_line_for_each_limit() -> None:
    """The table has every rule that applies, and marks shadow mode."""
    with stub_service(200, QUOTA) as service:
        result = run("quota", "--user", "42", url=service.url)
        told = run("quota", "--user", "42", "--json", url=service.url)
    assert result.exit_code == 0
    assert [line.split("  ") for line in re.sub(" {2,}", "  ", result.output).splitlines()] == [
        ["RULE", "COUNTS", "LIMIT", "FROM", "LEFT", "WHOLE AGAIN"],
        ["all", "user:42", "10/second", "tier pro", "7 of 10", "in 1 s"],
        ["all", "user:42", "100/second", "tier pro", "100 of 100", "now"],
        ["new (shadow)", "user:42", "5/second", "tier pro", "1 of 5", "in 1 s"],
        [
            *("dear", "user:42", "20/second"),
            *("tier pro (launch, until 2030-01-31 00:00:00Z)", "12 of 20", "in 1 s"),
        ],
    ]
    assert json.loads(told.output) == {"exit_code": 0, **QUOTA}
    assert service.received[0] == ReceivedRequest("GET", "/v1/quota?user=42", None, None)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("unlimited", "no rule applies\n"),
        ("exempt", "on the allow list\n"),
        ("blocked", "on the deny list\n"),
    ],
)
def test_quota_without_limits(kind: str, line: str) -> None:
    """The reason is printed instead of an empty table."""
    with stub_service(200, {"kind": kind, "rules": []}) as service:
        assert run("quota", "--user", "42", url=service.url).output == line
        code = 1 if kind == "blocked" else 0
        assert run("check", "--peek", "--user", "42", url=service.url).exit_code == code


SHADOW = ", shadow rules would deny it: new"


@pytest.mark.parametrize(
    ("cost", "line", "code"),
    [
        ("0", "would be allowed: 7 of 10 left of rule all\n", 0),
        ("1", "would be allowed: 7 of 10 left of rule all\n", 0),
        ("2", f"would be allowed: 7 of 10 left of rule all{SHADOW}\n", 0),
        # The last rule charges three units for each.
        (
            "5",
            f"would be denied: 7 of 10 left of rule all{SHADOW}\n",
            1,
        ),
        ("7", "ratekeeper: --cost 7 takes 21 units of rule dear, which can never fit", 2),
        ("-1", "ratekeeper: --peek checks once, with a --cost of 0 or more", 2),
    ],
)
def test_peek_is_computed_from_the_quota(cost: str, line: str, code: int) -> None:
    """Nothing is charged: the service gets only GET requests."""
    with stub_service(200, QUOTA) as service:
        result = run("check", "--user", "42", "--peek", "--cost", cost, url=service.url)
    assert result.exit_code == code
    assert result.output.startswith(line)
    assert {each.method for each in service.received} <= {"GET"}


def test_a_penalty_denies_a_peek() -> None:
    """The quota names the penalty, and a check during it says when to retry."""
    quota = {"kind": "limited", "rules": [rule("all", limit(0, 10, 8.0))]}
    quota["rules"][0]["penalty"] = {"kind": "cooldown", "retry_after": 8.0}
    with stub_service(200, quota) as service:
        peeked = run("check", "--user", "42", "--peek", "--cost", "0", url=service.url)
        shown = run("quota", "--user", "42", url=service.url)
    line = "would be denied: a cool-down of rule all, retry in 8 s\n"
    assert (peeked.output, peeked.exit_code) == (line, 1)
    assert "0 of 10 (a cool-down)" in shown.output
    with stub_service(429, {**DENIED, "penalty": "block"}) as service:
        checked = run("check", "--user", "42", url=service.url)
    assert checked.output == "denied: a block of rule orders, retry in 0.25 s\n"


@pytest.mark.parametrize("strange", [{}, {"remaining": "many", "limit": None}])
def test_unknown_quota_is_exit_code_2(strange: dict[str, object]) -> None:
    """`check --peek` fails; `quota` prints the members that it knows."""
    with stub_service(200, {"rules": [{"rule": "all", "limits": [strange]}]}) as service:
        result = run("check", "--peek", url=service.url)
        assert result.exit_code == 2
        assert "this version of the command does not understand the answer" in result.stderr
        result = run("quota", url=service.url)
        assert result.exit_code == 0
        assert result.output.splitlines()[1] == "all   all     ?      ?     ? of ?  in ?"


# ------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete(command: str) -> None:
    """It has every option with an explanation, the variables, the exit codes and an example."""
    assert re.search(rf"^  {command} +\S", run("--help").output, re.MULTILINE)
    told = run(command, "--help").output
    fields = ("--user", "--api-key", "--ip", "--tenant", "--tier", "--endpoint", "--method")
    for words in (
        *(("--limit", "--algorithm") if command == "limit" else (*fields, "--attribute")),
        *("--url", "--token", "--ca", "--timeout", "--json", "Exit code: 0"),
        *("RATEKEEPER_URL", "RATEKEEPER_TOKEN", "RATEKEEPER_CA", "RATEKEEPER_TIMEOUT"),
        f"Example: ratekeeper {command} ",
    ):
        assert words in told, words
    for line in told.splitlines():
        assert not re.fullmatch(r" +--[a-z-]+( [A-Z=]+)?", line), f"{line} is not explained"


def test_documentation_is_complete() -> None:
    """The page has every command and variable."""
    page = (Path(__file__).parents[2] / "docs/command-line.md").read_text(encoding="utf-8")
    variables = ("RATEKEEPER_URL", "RATEKEEPER_CA", "RATEKEEPER_TIMEOUT")
    for words in (*(f"`ratekeeper {each}" for each in COMMANDS), *variables):
        assert words in page, words


def test_the_quota_of_a_global_rule_has_the_regions() -> None:
    """The usage of all regions, and each region's part with its age."""
    limit = {"policy": "100/minute", "limit": 100, "remaining": 40, "used": 60}
    rule = {
        "rule": "plan",
        "mode": "enforce",
        "subject": "user:42",
        "source": "default",
        "cost": 1,
        "limits": [{**limit, "reset_after": 36.0}],
        "across_regions": "exact",
        "regions": [
            {"region": "eu", "units": 20, "age_seconds": 0.0},
            {"region": "us", "units": 1_040, "age_seconds": 0.25},
        ],
    }
    with stub_service(200, {"kind": "limited", "rules": [rule]}) as service:
        found = run("quota", "--user", "42", url=service.url)
    assert found.output.splitlines()[2:] == [
        "plan in all regions (exact): 60 of 100 used; eu 20 (now), us 1,040 (0.25 s ago)"
    ]
