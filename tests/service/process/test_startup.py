"""The startup of a service: what it checks, and what it prepares for its workers."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import ConfigError
from ratekeeper.service.http.tokens import Tokens, create_token
from ratekeeper.service.process import startup
from ratekeeper.service.process.settings import ServiceSettings
from tests.redis_servers.certificates import make_certificates

LOOPBACK = {"127.0.0.1", "::1"}
RULES = "version: 1\nrules:\n  - {id: a, by: [user], limits: [5/minute]}\n"


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """Write a rule document and return its path."""
    path = tmp_path / "limits.yaml"
    path.write_text(RULES)
    return str(path)


def given(tmp_path: Path, **more: Any) -> ServiceSettings:
    """Return settings with the data in a temporary folder."""
    return ServiceSettings.gather({"data": str(tmp_path / "data"), **more})


FAR: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"host": "0.0.0.0"}, False),
    ({"host": "0.0.0.0", "insecure_no_tokens": True}, True),
    ({"grpc": "0.0.0.0:8081"}, False),
]


@pytest.mark.parametrize(("more", "fine"), FAR)
def test_remote_access_needs_tokens(more: dict[str, Any], fine: bool, tmp_path: Path) -> None:
    """An address that other machines reach is rejected without tokens, unless forced."""
    settings = given(tmp_path, **more)
    if fine:
        startup.check_access(settings)
        return
    with pytest.raises(ConfigError, match="ratekeeper token create"):
        startup.check_access(settings)
    create_token(settings.tokens_path, "a", "check")
    startup.check_access(settings)


def test_tokens_stay_required_if_their_file_disappears(tmp_path: Path) -> None:
    """The settings that workers get contain the path of the file."""
    settings = given(tmp_path, host="0.0.0.0")
    create_token(settings.tokens_path, "a", "check")
    seen = startup.check_access(settings)
    settings.tokens_path.unlink()
    assert seen.tokens
    assert Tokens.load(seen.tokens_path, required=bool(seen.tokens)).required
    assert startup.check_access(given(tmp_path)).tokens == ""


def test_message_names_the_address_that_others_reach(tmp_path: Path) -> None:
    """It is one of the two that the service listens on."""
    with pytest.raises(ConfigError, match=r"^0\.0\.0\.0 can be reached"):
        startup.check_access(given(tmp_path, grpc="0.0.0.0:8081"))


def test_given_token_file_must_exist(tmp_path: Path) -> None:
    """A misspelt path must not disable the tokens."""
    with pytest.raises(ConfigError, match="does not exist"):
        startup.check_access(given(tmp_path, tokens=str(tmp_path / "tokns.json")))


def test_port_in_use_is_rejected(tmp_path: Path) -> None:
    """Workers share ports, but another service must not receive half of the requests."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for more in ({"port": port}, {"port": 0, "grpc": f"127.0.0.1:{port}"}):
            with (
                pytest.raises(ConfigError, match="in use"),
                startup.ports(given(tmp_path, **more)),
            ):
                pass


def test_the_keys_of_gossip_must_be_private(tmp_path: Path) -> None:
    """A file that is missing, wrong or readable for others is rejected with the reason."""
    path = tmp_path / "gossip.key"
    settings = given(
        tmp_path, store="redis://h", gossip="10.0.0.5:7946", gossip_key=str(path), port=0
    )
    with pytest.raises(ConfigError, match=r"--gossip-key .*No such file"):
        startup.check_gossip_key(settings)
    path.write_text("0f" * 32)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--gossip-key .*gossip.key"):
        startup.check_gossip_key(settings)
    path.chmod(0o600)
    startup.check_gossip_key(settings)
    path.write_text("short")
    with pytest.raises(ConfigError, match="hexadecimal"):
        startup.check_gossip_key(settings)
    startup.check_gossip_key(given(tmp_path))


def test_the_port_of_gossip_must_be_free(tmp_path: Path) -> None:
    """One process of the node binds it later; port 0 becomes a free port."""
    more: dict[str, Any] = {"store": "redis://h", "port": 0, "grpc": ""}
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        settings = given(tmp_path, **more, gossip=f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=r"--gossip .*in use"), startup.ports(settings):
            pass
    with startup.ports(settings) as found:
        assert found.gossip == f"127.0.0.1:{port}"
    with startup.ports(given(tmp_path, **more, gossip="[::1]:0")) as found:
        assert found.gossip.startswith("[::1]:")
        assert not found.gossip.endswith(":0")
    with startup.ports(given(tmp_path, port=0, grpc="")) as found:
        assert not found.gossip


@pytest.mark.parametrize(("host", "address"), [("localhost", LOOPBACK), ("[::1]", {"::1"})])
def test_host_name_is_resolved(host: str, address: set[str], tmp_path: Path) -> None:
    """The server needs an address."""
    settings = given(tmp_path, host=host, port=0, grpc="localhost:0")
    assert settings.is_local
    with startup.ports(settings) as listening:
        assert listening.host in address


def test_port_0_selects_a_reserved_port(tmp_path: Path) -> None:
    """All workers get the same port, and no other process can bind it."""
    settings = given(tmp_path, port=0, grpc="[::1]:0")
    with startup.ports(settings) as found:
        assert found.port
        assert found.grpc.startswith("[::1]:")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", found.port))


def test_run_folder(tmp_path: Path) -> None:
    """The folder of a killed run is removed; the folder of a running one is not."""
    data = tmp_path / "data"
    (data / "run-99999999").mkdir(parents=True)
    (data / f"run-{os.getppid()}").mkdir()
    (data / "run-x").mkdir()
    with startup.run_folder(given(tmp_path)) as folder:
        assert folder.is_dir()
        assert {each.name for each in data.iterdir()} == {
            folder.name,
            f"run-{os.getppid()}",
            "run-x",
        }
    assert not folder.exists()


@pytest.mark.parametrize("name", ["a b", "a?b", "a#b", "a%41b", "é"])
def test_data_folder_may_have_any_name(name: str, tmp_path: Path, rules: str) -> None:
    """Its name becomes part of URLs, where some characters must be quoted."""
    data = tmp_path / name
    settings = ServiceSettings.gather({"data": str(data), "seed": rules})
    data.mkdir()
    assert asyncio.run(startup.prepared(settings)) == ("1", 1)
    assert {"rules.db", "limits"} <= {each.name for each in data.iterdir()}
    assert {each.name for each in tmp_path.iterdir()} == {name, "limits.yaml"}


def test_database_is_seeded_once(tmp_path: Path, rules: str) -> None:
    """The document becomes version 1. A second startup changes nothing."""
    settings = given(tmp_path, seed=rules)
    Path(settings.data).mkdir()
    assert asyncio.run(startup.prepared(settings)) == ("1", 1)
    assert asyncio.run(startup.prepared(settings)) == ("1", 1)
    assert settings.database is not None

    async def authors(url: str) -> list[tuple[int, str]]:
        async with await Repository.open(url) as repository:
            return [(each.number, each.author) for each in await repository.history()]

    assert asyncio.run(authors(settings.database)) == [(1, "ratekeeper serve")]


def test_database_without_rules(tmp_path: Path) -> None:
    """The message says how to start with rules: every new user sees it."""
    Path(given(tmp_path).data).mkdir()
    with pytest.raises(ConfigError, match="ratekeeper serve --seed"):
        asyncio.run(startup.prepared(given(tmp_path)))


def test_unusable_certificates_are_rejected(tmp_path: Path) -> None:
    """The message names the files: no certificate, or the key of another one."""
    made = make_certificates(tmp_path)
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")

    def check(certificate: Path, key: Path) -> None:
        startup.check_tls(given(tmp_path, tls_cert=str(certificate), tls_key=str(key)))

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


def test_an_unusable_authority_of_clients_is_rejected(tmp_path: Path) -> None:
    """The message names the file."""
    made = make_certificates(tmp_path)
    own = {"tls_cert": str(made.server_cert_path), "tls_key": str(made.server_key_path)}
    startup.check_tls(given(tmp_path, **own, grpc_client_ca=str(made.ca_path)))
    with pytest.raises(ConfigError, match=r"--grpc-client-ca .*key.* has no certificate"):
        startup.check_tls(given(tmp_path, **own, grpc_client_ca=str(made.server_key_path)))
    with pytest.raises(ConfigError, match=r"--grpc-client-ca .*absent cannot be read"):
        startup.check_tls(given(tmp_path, **own, grpc_client_ca=str(tmp_path / "absent")))


def test_files_are_private(tmp_path: Path) -> None:
    """Even in a folder that other users can read."""
    settings = given(tmp_path)
    Path(settings.data).mkdir(mode=0o755)
    with startup.private_files(), startup.run_folder(settings) as folder:
        written = folder / "x"
        written.write_text("")
        assert written.stat().st_mode & 0o077 == 0


def test_limit_of_open_files_is_raised() -> None:
    """The usual limit of a shell is lower than the connections of one worker."""
    allowed = (
        "import resource;"
        "from ratekeeper.service.process.startup import allow_open_files as allow;"
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
