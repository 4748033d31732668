"""`tollkeeper serve`, before it serves: what it refuses, and how it says so."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.redis_servers.certificates import make_certificates
from tests.service_process import run_to_end
from tollkeeper.cli.main import app
from tollkeeper.control.repository import Repository
from tollkeeper.core.errors import ConfigError
from tollkeeper.service.http import token_file
from tollkeeper.service.http.tokens import Tokens
from tollkeeper.service.process import starting
from tollkeeper.service.process.server import started_line, url_of
from tollkeeper.service.process.settings import NAMES, Settings

run = CliRunner()
LOOPBACK = {"127.0.0.1", "::1"}
RULES = "version: 1\nrules:\n  - {id: a, by: [user], limits: [5/minute]}\n"


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """A rule document."""
    path = tmp_path / "limits.yaml"
    path.write_text(RULES)
    return str(path)


def given(tmp_path: Path, **more: Any) -> Settings:
    """Settings in a folder of the test's."""
    return Settings.gather({"data": str(tmp_path / "data"), **more})


def test_every_setting_is_an_option_and_a_variable() -> None:
    """The three have the same names."""
    text = run.invoke(app, ["serve", "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
    for name in NAMES:
        option = "--" + name.replace("_", "-")
        assert option in text, option
        assert f"TOLLKEEPER_{name.upper()}" in text, name


FAR: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"host": "0.0.0.0"}, False),
    ({"host": "0.0.0.0", "insecure_no_tokens": True}, True),
    ({"grpc": "0.0.0.0:8081"}, False),
]


def test_a_variable_that_kubernetes_sets_is_not_the_port(tmp_path: Path) -> None:
    """Where a service is called tollkeeper, TOLLKEEPER_PORT is its address. Only there."""
    # Refused when all settings were taken, and before a port is.
    options = ["serve", "--data", str(tmp_path), "--host", "0.0.0.0"]
    address = "tcp://10.0.0.7:8080"
    given = run_to_end(options, TOLLKEEPER_PORT=address)
    assert "--insecure-no-tokens" in given.stderr
    typed = run_to_end([*options, "--port", address])
    assert "Invalid value for '--port'" in typed.stderr
    wrong = run_to_end(options, TOLLKEEPER_PORT="eighty")
    assert "'eighty' is not a whole number" in wrong.stderr


@pytest.mark.parametrize(("more", "fine"), FAR)
def test_others_are_asked_for_tokens(more: dict[str, Any], fine: bool, tmp_path: Path) -> None:
    """An address that others reach, and no tokens: refused, unless one insists."""
    settings = given(tmp_path, **more)
    if fine:
        starting.check_access(settings)
        return
    with pytest.raises(ConfigError, match="tollkeeper token create"):
        starting.check_access(settings)
    token_file.create(settings.tokens_path, "a", "check")
    starting.check_access(settings)


def test_a_worker_that_starts_later_asks_for_the_tokens_too(tmp_path: Path) -> None:
    """Though the file has gone since: the settings that workers get name it."""
    settings = given(tmp_path, host="0.0.0.0")
    token_file.create(settings.tokens_path, "a", "check")
    seen = starting.check_access(settings)
    settings.tokens_path.unlink()
    assert seen.tokens
    assert Tokens.load(seen.tokens_path, demanded=bool(seen.tokens)).demanded
    assert starting.check_access(given(tmp_path)).tokens == ""


def test_it_is_said_which_address_others_reach(tmp_path: Path) -> None:
    """Of the two that it listens on."""
    with pytest.raises(ConfigError, match=r"^0\.0\.0\.0 can be reached"):
        starting.check_access(given(tmp_path, grpc="0.0.0.0:8081"))


def test_tokens_that_were_named_must_be_there(tmp_path: Path) -> None:
    """A misspelt path must not open the doors."""
    with pytest.raises(ConfigError, match="does not exist"):
        starting.check_access(given(tmp_path, tokens=str(tmp_path / "tokns.json")))


def test_a_port_that_somebody_has_is_refused(tmp_path: Path) -> None:
    """Workers share ports; another service must not get half of the requests."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for more in ({"port": port}, {"port": 0, "grpc": f"127.0.0.1:{port}"}):
            with (
                pytest.raises(ConfigError, match="in use"),
                starting.ports(given(tmp_path, **more)),
            ):
                pass


@pytest.mark.parametrize(("host", "address"), [("localhost", LOOPBACK), ("[::1]", {"::1"})])
def test_a_host_may_have_a_name(host: str, address: set[str], tmp_path: Path) -> None:
    """What is listened on is the address that it stands for: the server knows no other."""
    settings = given(tmp_path, host=host, port=0, grpc="localhost:0")
    assert settings.is_local
    with starting.ports(settings) as listening:
        assert listening.host in address


def test_port_0_is_one_that_is_kept(tmp_path: Path) -> None:
    """The same for all workers, and nobody else's meanwhile."""
    settings = given(tmp_path, port=0, grpc="[::1]:0")
    with starting.ports(settings) as found:
        assert found.port
        assert found.grpc.startswith("[::1]:")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", found.port))


def test_the_folder_of_a_run_is_its_own(tmp_path: Path) -> None:
    """What a killed run has left is removed; what another has is not."""
    data = tmp_path / "data"
    (data / "run-99999999").mkdir(parents=True)
    (data / f"run-{os.getppid()}").mkdir()
    (data / "run-x").mkdir()
    with starting.run_folder(given(tmp_path)) as folder:
        assert folder.is_dir()
        assert {each.name for each in data.iterdir()} == {
            folder.name,
            f"run-{os.getppid()}",
            "run-x",
        }
    assert not folder.exists()


@pytest.mark.parametrize("name", ["a b", "a?b", "a#b", "a%41b", "é"])
def test_a_data_folder_may_have_any_name(name: str, tmp_path: Path, rules: str) -> None:
    """What is kept is kept in it, though it is named in URLs."""
    data = tmp_path / name
    settings = Settings.gather({"data": str(data), "seed": rules})
    data.mkdir()
    assert asyncio.run(starting.prepared(settings)) == "1"
    assert {"rules.db", "limits"} <= {each.name for each in data.iterdir()}
    assert {each.name for each in tmp_path.iterdir()} == {name, "limits.yaml"}


def test_a_database_is_seeded_once(tmp_path: Path, rules: str) -> None:
    """The document becomes version 1; later ones are changed elsewhere."""
    settings = given(tmp_path, seed=rules)
    Path(settings.data).mkdir()
    assert asyncio.run(starting.prepared(settings)) == "1"
    assert asyncio.run(starting.prepared(settings)) == "1"
    assert settings.database is not None

    async def authors(url: str) -> list[tuple[int, str]]:
        async with await Repository.open(url) as repository:
            return [(each.number, each.author) for each in await repository.history()]

    assert asyncio.run(authors(settings.database)) == [(1, "tollkeeper serve")]


def test_a_database_without_rules_says_how_to_get_some(tmp_path: Path) -> None:
    """The first thing that anybody meets."""
    Path(given(tmp_path).data).mkdir()
    with pytest.raises(ConfigError, match="tollkeeper serve --seed"):
        asyncio.run(starting.prepared(given(tmp_path)))


WRONG: list[tuple[list[str], int, str]] = [
    (["--port", "70000"], 2, "not between"),
    (["--rules", "missing.yaml"], 2, "missing.yaml"),
    (["--store", "nonsense://"], 2, "scheme"),
    (["--identify", "user=nonsense"], 2, "nonsense"),
    (["--trusted-proxy", "nonsense"], 2, "nonsense"),
    (["--tls-cert", "a", "--tls-key", "b"], 2, "cannot be read"),
    (["--config", "missing.yaml"], 2, "missing.yaml"),
    (["--on-failure", "perhaps"], 2, "open, closed"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), WRONG)
def test_what_is_wrong_is_said_before_anything_starts(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    rules: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line on the standard error, no traceback, no worker."""
    monkeypatch.setattr(starting.logging.config, "dictConfig", lambda _: None)
    given_rules = [] if "--rules" in arguments else ["--rules", rules]
    ports = [] if "--port" in arguments else ["--port", "0"]
    done = run.invoke(
        app,
        ["serve", "--data", str(tmp_path / "d"), "--no-grpc", *ports, *given_rules, *arguments],
    )
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_certificates_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    """By name: no certificate at all, and the key of another."""
    made = make_certificates(tmp_path)
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")

    def check(certificate: Path, key: Path) -> None:
        starting.check_tls(given(tmp_path, tls_cert=str(certificate), tls_key=str(key)))

    check(made.server_cert_path, made.server_key_path)
    for certificate, key in (
        (nothing, made.server_key_path),
        (made.server_cert_path, nothing),
        (made.server_cert_path, made.client_key_path),
    ):
        with pytest.raises(ConfigError, match=r"--tls-cert .* are not a certificate and its key"):
            check(certificate, key)
    with pytest.raises(ConfigError, match="cannot be read"):
        check(tmp_path, made.server_key_path)


def test_what_a_service_makes_is_for_its_user_alone(tmp_path: Path) -> None:
    """Also in a folder that others can read."""
    settings = given(tmp_path)
    Path(settings.data).mkdir(mode=0o755)
    with starting.private_files(), starting.run_folder(settings) as folder:
        written = folder / "x"
        written.write_text("")
        assert written.stat().st_mode & 0o077 == 0


def test_a_document_that_is_wrong_says_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tollkeeper rules validate` does."""
    monkeypatch.setattr(starting.logging.config, "dictConfig", lambda _: None)
    path = tmp_path / "wrong.yaml"
    path.write_text("version: 1\nrules:\n  - {id: a, by: [user], limits: [5/fortnite]}\n")
    done = run.invoke(
        app,
        ["serve", "--data", str(tmp_path), "--no-grpc", "--port", "0", "--rules", str(path)],
    )
    assert done.exit_code == 2
    assert "wrong.yaml:3" in done.stderr


def test_the_line_at_the_start_has_what_one_needs(tmp_path: Path) -> None:
    """Where, which rules, which store without its password, and a command that works."""
    settings = given(
        tmp_path,
        rules="postgresql://app:pa55@db/rules",
        store="redis://app:pa55@cache/0",
        host="0.0.0.0",
        tls_cert="c",
        tls_key="k",
    )
    line = started_line(settings, "12")
    assert "pa55" not in line
    assert "version 12" in line
    assert url_of(settings) == "https://127.0.0.1:8080"
    assert "curl -k https://127.0.0.1:8080/v1/check -d" in line
    token_file.create(settings.tokens_path, "a", "check")
    assert "$TOLLKEEPER_TOKEN" in started_line(settings, "12")


def test_it_may_have_more_connections_than_a_shell_allows() -> None:
    """The bound that is usual for shells is less than the connections of one worker."""
    allowed = (
        "import resource;"
        "from tollkeeper.service.process.starting import allow_open_files as allow;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard));"
        "allow();"
        "most = hard if 0 <= hard < 65_536 else 65_536;"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard))"
    )
    done = subprocess.run(
        [sys.executable, "-c", allowed], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
