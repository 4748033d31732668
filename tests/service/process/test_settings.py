"""What `tollkeeper serve` can be told: where it comes from, and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tollkeeper.core.errors import ConfigError
from tollkeeper.decide.local_fallback import LocalFallback
from tollkeeper.service.process.settings import Settings, address_of, state_folder


def test_without_anything_it_is_this_machine_alone(tmp_path: Path) -> None:
    """Loopback, a shared file and a database in the data folder, one worker a processor."""
    settings = Settings.gather({"data": str(tmp_path)})
    assert (settings.host, settings.port, settings.grpc) == ("127.0.0.1", 8080, "127.0.0.1:8081")
    assert settings.store == f"shared://{tmp_path}/limits"
    assert settings.rules == settings.database == f"sqlite:///{tmp_path}/rules.db"
    assert settings.workers >= 1
    assert settings.is_local
    assert settings.node_id
    assert settings.tokens_path == tmp_path / "tokens.json"


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    """And the file before the defaults; names with dashes or without."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "port: 9000\nnode-id: eu-1\ntrusted_proxy: [10.0.0.0/8]\nidentify: api_key=header:X-Key\n"
        "drain-seconds: 3\ngrpc: no\ndraft: 7\naccess-log: true\n"
    )
    given: dict[str, Any] = {"port": 9001, "node_id": None, "trusted_proxy": [], "identify": None}
    settings = Settings.gather(given, str(config))
    assert (settings.port, settings.node_id, settings.drain_seconds) == (9001, "eu-1", 3.0)
    assert settings.trusted_proxy == ("10.0.0.0/8",)
    assert settings.sources == {"api_key": ["header:X-Key"]}
    assert (settings.grpc, settings.draft, settings.access_log) == ("", "7", True)


FILES: list[tuple[str, str]] = [
    ("prt: 1", "'prt' is not a setting; there are host, port"),
    ("port: x", "port: 'x' is not a whole number"),
    ("port: true", "not a whole number"),
    ("port: 70000", "not between 0 and 65535"),
    ("node-id: a\nnode_id: b", "twice"),
    ("on-failure: maybe", "one of open, closed, local"),
    ("ceiling: lots", "--ceiling, --emergency or --emergency-after: expected how many units"),
    ("emergency: 60/fortnight", "fortnight"),
    ("emergency-after: -1", "emergency_after"),
    ("draft: 8", "one of 10, 7, 6, none"),
    ("log-format: xml", "one of auto, json, text"),
    ("access-log: 5", "true or false"),
    ("trusted-proxy: 5", "a list"),
    ("[1, 2]", "not a list of settings"),
    ("{", "is not YAML"),
    ("a: &a [*a]", "is not"),
    ("grpc: nonsense", "HOST:PORT"),
    ("grpc: '127.0.0.1:99999'", "HOST:PORT"),
    ("workers: 100000", "workers 100000 is not between"),
    ("shutdown-seconds: 0", "shutdown-seconds 0 is not between"),
    ("tls-cert: a.pem", "go together"),
    ("node-id: 'a b'", "letters, digits"),
    ("rules: limits.yaml\nseed: limits.yaml", "drop --seed"),
]


@pytest.mark.parametrize(("text", "said"), FILES)
def test_what_is_wrong_is_said(text: str, said: str, tmp_path: Path) -> None:
    """Each with what would be right."""
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Settings.gather({}, str(config))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """Not an empty one; which an empty one is."""
    with pytest.raises(ConfigError, match="No such file"):
        Settings.gather({}, str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("\n")
    assert Settings.gather({}, str(tmp_path / "empty.yaml")).port == 8080


LOCAL: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"host": "localhost"}, True),
    ({"host": "::1", "grpc": "[::1]:1"}, True),
    ({"host": "127.8.8.8"}, True),
    ({"host": "0.0.0.0"}, False),
    ({"host": "::"}, False),
    ({"host": "10.0.0.1"}, False),
    ({"host": "example.com"}, False),
    ({"grpc": "0.0.0.0:8081"}, False),
    ({"grpc": ""}, True),
]


@pytest.mark.parametrize(("given", "expected"), LOCAL)
def test_who_can_reach_it(given: dict[str, Any], expected: bool) -> None:
    """Over HTTP or gRPC: one door that is open is open."""
    assert Settings.gather(given).is_local is expected


@pytest.mark.parametrize("given", ["api_key", "=header:X", "api_key="])
def test_an_identity_has_a_field_and_a_source(given: str) -> None:
    """Or it says how one looks."""
    with pytest.raises(ConfigError, match="FIELD=SOURCE"):
        _ = Settings(identify=(given,)).sources


def test_a_field_may_have_several_sources() -> None:
    """In the order in which they were given."""
    given = ("api_key=bearer", "user=session:id", "api_key=query:key")
    assert Settings(identify=given).sources == {
        "api_key": ["bearer", "query:key"],
        "user": ["session:id"],
    }


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/state", "/state/tollkeeper"), ("relative", "~/.local/state/tollkeeper"), ("", "~")],
)
def test_state_is_where_the_standard_says(variable: str, expected: str) -> None:
    """XDG: a relative path is to be ignored."""
    found = state_folder({"XDG_STATE_HOME": variable})
    assert str(found).startswith(str(Path(expected).expanduser()))


def test_an_address_is_a_host_and_a_port() -> None:
    """IPv6 in brackets."""
    assert address_of("[2001:db8::1]:80") == ("2001:db8::1", 80)
    for wrong in ("8081", ":8081", "host:", "::1:80", "host:port", "a b:1"):
        with pytest.raises(ConfigError):
            address_of(wrong)


def test_a_terminal_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a file gets JSON; whoever says it gets what he says."""
    assert Settings.gather({}).log_format == "json"
    assert Settings.gather({"log_format": "text"}).log_format == "text"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert Settings.gather({}).log_format == "text"


def test_a_store_on_this_machine_needs_no_file_for_its_absence() -> None:
    """Another is counted for by all workers together while it is away."""
    assert Settings.gather({}).local_fallback.store == "memory://"
    redis = Settings.gather({"store": "redis://cache", "data": "/var/lib/x"})
    assert redis.local_fallback.store == "shared:///var/lib/x/local_fallback"


@pytest.mark.parametrize("said", ["record: off", "record: no", 'record: "off"'])
def test_records_are_in_the_data_folder_or_nowhere(said: str, tmp_path: Path) -> None:
    """YAML takes `off` for false, and it means the same."""
    assert Settings.gather({"data": str(tmp_path)}).record == f"sqlite:///{tmp_path}/records.db"
    config = tmp_path / "config.yaml"
    config.write_text(f"{said}\nsample: 1\nkeep-usage: 30\nrecord-subjects: hashed\n")
    settings = Settings.gather({}, str(config))
    assert (settings.record, settings.sample, settings.keep_usage) == ("off", 1.0, 30)
    assert settings.record_subjects == "hashed"


def test_how_it_stands_by(tmp_path: Path) -> None:
    """Workers count together in a file where the store is elsewhere; and under all the bounds."""
    settings = Settings.gather(
        {
            "data": str(tmp_path),
            "store": "redis://cache",
            "on_failure": "local",
            "nodes": 20,
            "ceiling": "5000/second",
            "emergency": "60/minute",
            "emergency_after": 300.0,
        },
        None,
    )
    assert settings.on_failure == "local"
    assert settings.local_fallback == LocalFallback(
        20, f"shared://{tmp_path}/local_fallback", "5000/second", "60/minute", 300.0
    )
    assert Settings.gather({"data": str(tmp_path)}, None).local_fallback == LocalFallback()


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)
    with pytest.raises(ConfigError, match="--data /var/lib/tollkeeper"):
        Settings.gather({})
    with pytest.raises(ConfigError, match="no home directory"):
        Settings.gather({"data": "~nobody-of-this-name/data"})
