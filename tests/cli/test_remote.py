"""`tollkeeper check`, `quota`, `reset`, `grant`: what they send, print and return.

Here the other end is a few lines that give one answer, over a real socket: right ones, and those
that no service gives. With a real service they are in tests/integration/test_remote_cli.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.answering import ALLOWED, DENIED, Asked, answering, run
from tests.redis_servers.ports import free_port
from tollkeeper.cli.remote_print import check_text

COMMANDS = ("check", "quota", "reset", "grant")
TOKEN = "tk_s3cret"

# -------------------------------------------------------------------------------------------- check


def test_allowed_is_exit_code_0_and_denied_is_1() -> None:
    """So that a script can go by it; the line says what is left, and when to come back."""
    with answering(200, ALLOWED) as service:
        result = run("check", "--user", "42", url=service.url)
        assert (result.output, result.exit_code) == ("allowed: 73 of 100 left of rule orders\n", 0)
    with answering(429, DENIED) as service:
        result = run("check", "--user", "42", url=service.url)
        line = "denied: 0 of 100 left of rule orders, again in 0.25 s\n"
        assert (result.output, result.exit_code) == (line, 1)


def test_the_fields_of_the_request_are_sent_as_the_service_takes_them() -> None:
    """What was not given is not sent, so that a rule for those without it is met."""
    with answering(200, ALLOWED) as service:
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
    assert service.asked == [
        Asked("POST", "/v1/check", None, whole),
        Asked("POST", "/v1/check", None, {"cost": 1}),
    ]


def test_json_is_the_services_answer_with_the_exit_code() -> None:
    """Of several, the sums and the last answer."""
    with answering(429, DENIED) as service:
        result = run("check", "--user", "42", "--json", url=service.url)
        assert json.loads(result.output) == {"exit_code": 1, **DENIED}
        result = run("check", "--user", "42", "--json", "--count", "3", url=service.url)
        sums = {"exit_code": 1, "count": 3, "allowed": 0, "denied": 3}
        assert json.loads(result.output) == {**sums, "last": DENIED}
    assert len(service.asked) == 4


def test_several_are_summed_up() -> None:
    """How many passed, and what the last of them was told."""
    with answering(200, ALLOWED) as service:
        result = run("check", "--count", "3", url=service.url)
    line = "allowed 3, denied 0 of 3; the last: allowed: 73 of 100 left of rule orders\n"
    assert (result.output, result.exit_code) == (line, 0)


LEFT = "73 of 100 left of rule orders"
POLICY = "the store cannot decide, so the failure policy of rule orders does"
SHADOW = "would be denied by the shadow rules"
CLOSED = {"kind": "unavailable", "allowed": False, "degraded": True, "retry_after": 1.0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "unlimited"}, "allowed: no rule applies"),
        ({"kind": "exempt"}, "allowed: on the allow list"),
        ({"kind": "blocked", "allowed": False}, "denied: on the deny list"),
        (CLOSED, f"denied: {POLICY}, again in 1 s"),
        ({"degraded": True}, f"allowed: {POLICY}"),
        ({"delay": 1.5}, f"allowed: {LEFT}, to be served after 1.5 s"),
        (
            {"shadow_denied": ["a", "b"]},
            f"allowed: {LEFT}, would be denied by the shadow rules: a, b",
        ),
        ({"allowed": False, "retry_after": 1234.5}, f"denied: {LEFT}, again in 1,234 s"),
    ],
)
def test_each_kind_of_answer_has_its_words(changes: dict[str, object], line: str) -> None:
    """A person reads why, not only whether."""
    assert check_text({**ALLOWED, **changes}) == line


def test_an_answer_with_nothing_in_it_is_told_all_the_same() -> None:
    """A service of another version may leave things out."""
    assert check_text({"allowed": False}) == "denied: ? of ? left"


# ------------------------------------------------------------------------------------ the others


def test_reset_and_grant_say_what_was_done() -> None:
    """To whom, and how much; and send it in the form that the service takes."""
    with answering(204, b"") as service:
        request = ["--user", "42", "--attribute", "region=e u"]
        done = run("reset", *request, url=service.url)
        assert (done.output, done.exit_code) == (
            "reset: user 42, region e u has its whole quota again\n",
            0,
        )
        done = run("grant", *request, "--units", "5000", "--ttl", "1.5h", url=service.url)
        assert done.output == "granted: user 42, region e u has 5,000 more for 1.5h\n"
        done = run("grant", "--user", "42", "--units", "5", "--json", url=service.url)
        assert json.loads(done.output) == {"exit_code": 0, "granted": {"user": "42", "units": 5}}
    attributes = {"region": "e u"}
    grant = {"user": "42", "attributes": attributes, "units": 5000, "ttl_seconds": 5400.0}
    assert service.asked == [
        Asked("DELETE", "/v1/quota?user=42&attributes.region=e+u", None, None),
        Asked("POST", "/v1/quota/grant", None, grant),
        Asked("POST", "/v1/quota/grant", None, {"user": "42", "units": 5}),
    ]


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("arguments", [["check"], ["quota"], ["reset"], ["grant", "--units", "1"]])
def test_where_nobody_listens_it_says_how_to_start_one(arguments: list[str]) -> None:
    """Exit code 2, and no traceback; with --json, as a document."""
    url = f"http://127.0.0.1:{free_port()}"
    result = run(*arguments, "--url", url)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"tollkeeper: {url} cannot be asked (")
    assert "`tollkeeper serve`" in result.stderr
    assert "TOLLKEEPER_URL" in result.stderr
    result = run(*arguments, "--url", url, "--json")
    assert json.loads(result.stdout)["exit_code"] == 2


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            401,
            {"detail": "no token"},
            "wants a token: no token. Here it is given in TOLLKEEPER_TOKEN",
        ),
        (403, {"detail": "tenant must be acme"}, "the token may not do this: tenant must be acme"),
        (422, {"title": "never fits", "status": 422}, "answers 422: never fits"),
        (400, {"detail": "a\x1b[31m\nb" + "c" * 10_000}, "answers 400: a [31m bccc"),
        (404, b"<html>", "answers 404, but not as Tollkeeper does"),
        (200, b"hello", "answers 200, but not as Tollkeeper does"),
        (200, b"[" * 100_000, "answers 200, but not as Tollkeeper does"),
        (200, {"colour": "red"}, "answers 200, but not as Tollkeeper does"),
        (200, [ALLOWED], "answers 200, but not as Tollkeeper does"),
        (200, b"", "answers 200, but not as Tollkeeper does"),
        (503, b"", "answers 503, but not as Tollkeeper does"),
        (200, b"x" * 5_000_000, "sent more than 4,194,304 bytes"),
    ],
)
def test_what_is_no_answer_is_exit_code_2(status: int, body: object, words: str) -> None:
    """And told on one line, whatever it holds."""
    with answering(status, body) as service:
        result = run("check", "--user", "42", url=service.url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1_000
    assert "\x1b" not in result.stderr


def test_a_redirect_is_not_followed() -> None:
    """The token would go to wherever somebody points."""
    with answering(200, ALLOWED) as other, answering(301, b"", location=other.url) as service:
        result = run("check", "--user", "42", url=service.url, TOKEN=TOKEN)
    assert result.exit_code == 2
    assert f"points to {other.url}; give that as --url" in result.stderr
    assert other.asked == []


def test_a_service_that_is_silent_is_given_up() -> None:
    """After --timeout, with the option that changes it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_port}"  # it listens, and nobody accepts
        result = run("check", "--timeout", "0.05", url=url)
    assert result.exit_code == 2
    assert result.stderr == (
        f"tollkeeper: {url} did not answer within 0.05 s; --timeout allows it more\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "--url", "localhost:8080"], "--url is not an address"),
        (["check", "--url", "http://a:s3cret@h"], "with the token in TOLLKEEPER_TOKEN"),
        (["check", "--url", "http://h:s3cret"], "--url is not an address"),
        (["check", "--url", "https://h", "--ca", "gone.pem"], "--ca 'gone.pem' cannot be used: No"),
        (["check", "--timeout", "0"], "--timeout 0 is not between"),
        (["check", "--timeout", "nan"], "--timeout nan is not between"),
        (["check", "--count", "0"], "--count 0 is not between 1 and 100,000"),
        (["check", "--attribute", "region"], "has no name or no =; try region=eu"),
        (["quota", "--attribute", "a=1", "--attribute", "a=2"], "'a' is given twice"),
        (["check", "--token", "tk_s3cret twice"], "characters that no token has"),
        (["grant", "--units", "1", "--ttl", "1 fortnight"], "try 90s, 10m or 1h"),
        (["grant"], "--units"),
        (["check", "--user", "\udcff"], "that are not UTF-8"),
        (["quota", "--attribute", "region=\udcff"], "that are not UTF-8"),
        (["check", "tk_s3cret"], "unexpected extra argument(s) (a token)"),
        (["check", "http://a:s3cret@h"], "unexpected extra argument(s) a URL"),
        (["check", "--cost", "tk_s3cret"], "Invalid value for '--cost'"),
    ],
)
def test_wrong_arguments_are_exit_code_2_and_secrets_are_not_repeated(
    arguments: list[str], words: str
) -> None:
    """Nothing is asked, and what is wrong is said with what would be right."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "s3cret" not in result.output
    assert "Traceback" not in result.output


def test_the_token_is_sent_and_never_shown() -> None:
    """Not in an answer, an error, or the help; from the variable as well as the option."""
    shown = []
    with answering(200, ALLOWED) as service:
        shown += [run("check", url=service.url, TOKEN=TOKEN)]
        shown += [run("check", "--token", TOKEN, "--json", url=service.url)]
    assert [each.authorization for each in service.asked] == [f"Bearer {TOKEN}"] * 2
    with answering(401, b"") as service:
        shown += [run("check", *more, url=service.url, TOKEN=TOKEN) for more in ([], ["--json"])]
    shown += [run("check", "--help", TOKEN=TOKEN)]
    assert [each.exit_code for each in shown] == [0, 0, 2, 2, 0]
    for each in shown:
        assert "s3cret" not in each.output


def test_a_proxy_of_the_environment_is_not_asked_for_what_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could not reach this machine's loopback address."""
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(200, ALLOWED) as service:
        assert run("check", url=service.url).exit_code == 0


def test_without_httpx_it_says_how_to_get_it() -> None:
    """One line, and the other commands work."""
    program = (
        "import sys; sys.modules['httpx'] = None; sys.argv = ['tollkeeper', *{!r}]\n"
        "from tollkeeper.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program.format(["check"])],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "pip install 'tollkeeper[client]'" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete(command: str) -> None:
    """Every option with words of its own, the variables, the exit codes and an example."""
    assert re.search(rf"^  {command} +\S", run("--help").output, re.MULTILINE)
    told = run(command, "--help").output
    for words in (
        *("--user", "--api-key", "--ip", "--tenant", "--tier", "--endpoint", "--method"),
        *("--attribute", "--url", "--token", "--ca", "--timeout", "--json", "Exit code: 0"),
        *("TOLLKEEPER_URL", "TOLLKEEPER_TOKEN", "TOLLKEEPER_CA"),
        f"Example: tollkeeper {command} ",
    ):
        assert words in told, words
    for line in told.splitlines():
        assert not re.fullmatch(r" +--[a-z-]+( [A-Z=]+)?", line), f"{line} is not explained"


def test_the_pages_tell_of_every_command_and_variable() -> None:
    """What is not written down is not there."""
    page = (Path(__file__).parents[2] / "docs/command-line.md").read_text(encoding="utf-8")
    for words in (*(f"`tollkeeper {each}" for each in COMMANDS), "TOLLKEEPER_URL", "TOLLKEEPER_CA"):
        assert words in page, words
