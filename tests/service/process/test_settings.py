"""The settings of `ratekeeper serve`: their sources, defaults and checks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.failure import LocalFallback
from ratekeeper.fleet.settings import Fleet
from ratekeeper.regions.settings import Regions
from ratekeeper.service.process.settings import ServiceSettings, state_folder


def test_defaults_serve_this_machine_only(tmp_path: Path) -> None:
    """Loopback, a shared file and a database in the data folder, one worker per processor."""
    settings = ServiceSettings.gather({"data": str(tmp_path)})
    assert (settings.host, settings.port, settings.grpc) == ("127.0.0.1", 8080, "127.0.0.1:8081")
    assert settings.store == f"shared://{tmp_path}/limits"
    assert settings.rules == settings.database == f"sqlite:///{tmp_path}/rules.db"
    assert settings.workers >= 1
    assert settings.is_local
    assert settings.node_name
    assert settings.node_header != settings.node_name
    assert settings.tokens_path == tmp_path / "tokens.json"


def test_command_line_overrides_file(tmp_path: Path) -> None:
    """The file overrides the defaults; names may have dashes or underscores."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "port: 9000\nnode-id: eu-1\ntrusted_proxy: [10.0.0.0/8]\nidentify: api_key=header:X-Key\n"
        "drain-seconds: 3\ngrpc: no\ndraft: 7\naccess-log: true\n"
    )
    given: dict[str, Any] = {"port": 9001, "node_id": None, "trusted_proxy": [], "identify": None}
    settings = ServiceSettings.gather(given, str(config))
    assert (settings.port, settings.node_id, settings.drain_seconds) == (9001, "eu-1", 3.0)
    assert settings.trusted_proxy == ("10.0.0.0/8",)
    assert settings.sources == {"api_key": ["header:X-Key"]}
    assert (settings.grpc, settings.draft, settings.access_log) == ("", "7", True)


FILES: list[tuple[str, str]] = [
    ("prt: 1", "unknown field 'prt'; did you mean \"port\"?"),
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
    ("[1, 2]", "not a mapping of settings"),
    ("{", "is not YAML"),
    ("a: &a [*a]", "unknown field"),
    ("grpc: nonsense", "HOST:PORT"),
    ("grpc: '127.0.0.1:99999'", "HOST:PORT"),
    ("workers: 100000", "workers 100000 is not between"),
    ("shutdown-seconds: 0", "shutdown-seconds 0 is not between"),
    ("tls-cert: a.pem", "belong together"),
    ("grpc-client-ca: a.pem", "is for gRPC with TLS"),
    ("{grpc-client-ca: a, tls-cert: b, tls-key: c, grpc: no}", "is for gRPC with TLS"),
    ("node-id: 'a b'", "letters, digits"),
    ("rules: limits.yaml\nseed: limits.yaml", "remove --seed"),
    ("lease-seconds: 0", "lease-seconds 0 is not between 0.02 and 2"),
    ("flush-seconds: 11", "flush-seconds 11 is not between"),
    ("dead-seconds: 0", "dead-seconds 0 is not between"),
    ("dead-seconds: 61", "dead-seconds 61 is not between 1 and 60"),
    ("warm: 2", "warm 2 is not between 0 and 1"),
    ("peers: a:1", "--peers has no effect without --gossip"),
    ("gossip-key: k", "--gossip-key has no effect without --gossip"),
    ("gossip-advertise: 10.0.0.5:1", "--gossip-advertise has no effect without --gossip"),
    ("fleet-name: api", "--fleet-name has no effect without --gossip"),
    ("store: redis://h\ngossip: '127.0.0.1:1'\ngossip-advertise: n:1", "--gossip-advertise: 'n:1'"),
    ("gossip: '127.0.0.1:7946'", "--gossip is for machines that share a store"),
    ("store: redis://h\ngossip: '7946'", "HOST:PORT"),
    ("store: redis://h\ngossip: node-7:7946", "--gossip: 'node-7:7946' has a name"),
    ("store: redis://h\ngossip: 10.0.0.5:7946", "no --gossip-key: any of them could have"),
    ("store: redis://h\ngossip: 0.0.0.0:7946", "openssl rand -hex 32"),
    ("store: redis://h\ngossip: '127.0.0.1:7946'\npeers: [store, a:1]", "give it alone"),
    ("store: redis://h\ngossip: '127.0.0.1:7946'\npeers: dns:nodes", "'nodes' is not HOST:PORT"),
    (
        f"store: redis://h\ngossip: '127.0.0.1:7946'\ndata: /srv/{'a' * 100}",
        "longer than 107 bytes; use a shorter path for --data",
    ),
    ("regions: {eu: redis://h}", "--regions has no effect without --region, the name"),
    ("region-shares: {eu: 1}", "--region-shares has no effect without --region"),
    ("region: eu", "--region 'eu' needs the table of all regions.*--regions eu=redis://localhost"),
    ("region: jp\nregions: {eu: redis://h}", "'jp' is not in the table of regions, which has eu"),
    ("region: eu\nregions: [eu]", "--regions: a value without = is not NAME=VALUE"),
    ("region: eu\nregions: ['eu=']", "--regions: 'eu' is not NAME=VALUE; for example"),
    ("region: eu\nregions: [eu=redis://a, eu=redis://b]", "the region 'eu' occurs twice"),
    ("region: eu\nregions: {eu: 'memory://'}", "the region 'eu' needs the URI of its Redis"),
    ("region: eu\nregions: {eu: {store: redis://h}}", "the region 'eu' needs the URI"),
    ("region: eu\nregions: 5", "regions is not a list of at most 100 strings"),
    ("region: eu\nregions: {eu: redis://h}\nregion-shares: {eu: half}", "not a number such as 0.4"),
    ("region: eu\nregions: {eu: redis://h}\nregion-shares: {eu: 1e9}", "not a number such as"),
    ("region: eu\nregions: {eu: redis://h}\nregion-shares: {eu: 0.5}", "shares add up to 1"),
    ("region: eu\nregions: {eu: redis://h}\nstore: redis://x", "--store has no effect with"),
]


def test_the_table_of_regions(tmp_path: Path) -> None:
    """A mapping in the file, NAME=URI elsewhere; the store is that of the region."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "region: us\nregions:\n  eu: redis://eu.internal\n  us: rediss://u:secret@us.internal/2\n"
        "region-shares: {eu: 0.4, us: 3/5}\n"
    )
    settings = ServiceSettings.gather({}, str(config))
    stores = {"eu": "redis://eu.internal", "us": "rediss://u:secret@us.internal/2"}
    assert settings.region_table == Regions("us", stores, {"eu": 0.4, "us": 0.6})
    assert settings.store == stores["us"]
    assert settings.fleet is not None
    given = {"region": "eu", "regions": [f"{name}={uri}" for name, uri in stores.items()]}
    assert ServiceSettings.gather(given).region_table == Regions("eu", stores)
    assert ServiceSettings.gather({}).region_table is None


def test_a_wrong_table_shows_no_password(tmp_path: Path) -> None:
    """Whatever is wrong with it."""
    config = tmp_path / "config.yaml"
    for table in ("'eu:secret'", "{eu: 'redis//u:secret@h'}", "{eu: {uri: secret}}", "[[secret]]"):
        config.write_text(f"region: eu\nregions: {table}\n")
        with pytest.raises(ConfigError) as caught:
            ServiceSettings.gather({}, str(config))
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), FILES)
def test_invalid_settings_are_rejected(text: str, message: str, tmp_path: Path) -> None:
    """The message says which value is wrong and what is allowed."""
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        ServiceSettings.gather({}, str(config))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    """An empty file is not an error: it has no settings."""
    with pytest.raises(ConfigError, match="No such file"):
        ServiceSettings.gather({}, str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("\n")
    assert ServiceSettings.gather({}, str(tmp_path / "empty.yaml")).port == 8080


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
def test_is_local(given: dict[str, Any], expected: bool) -> None:
    """One address that other machines reach, for HTTP or gRPC, is enough to be not local."""
    assert ServiceSettings.gather(given).is_local is expected


@pytest.mark.parametrize("given", ["api_key", "=header:X", "api_key="])
def test_identity_needs_a_field_and_a_source(given: str) -> None:
    """The message shows the form."""
    with pytest.raises(ConfigError, match="FIELD=SOURCE"):
        _ = ServiceSettings(identify=(given,)).sources


def test_field_with_several_sources() -> None:
    """They are tried in the given order."""
    given = ("api_key=bearer", "user=session:id", "api_key=query:key")
    assert ServiceSettings(identify=given).sources == {
        "api_key": ["bearer", "query:key"],
        "user": ["session:id"],
    }


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/state", "/state/ratekeeper"), ("relative", "~/.local/state/ratekeeper"), ("", "~")],
)
def test_state_folder_follows_xdg(variable: str, expected: str) -> None:
    """A relative path is ignored."""
    found = state_folder({"XDG_STATE_HOME": variable})
    assert str(found).startswith(str(Path(expected).expanduser()))


def test_log_format_is_text_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is JSON in a pipe or a file, unless it is given."""
    assert ServiceSettings.gather({}).log_format == "json"
    assert ServiceSettings.gather({"log_format": "text"}).log_format == "text"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert ServiceSettings.gather({}).log_format == "text"


def test_fallback_counts_are_shared_by_workers() -> None:
    """Only for a remote store: a local one cannot be unavailable and needs no second file."""
    assert ServiceSettings.gather({}).local_fallback.store == "memory://"
    redis = ServiceSettings.gather({"store": "redis://cache", "data": "/var/lib/x"})
    assert redis.local_fallback.store == "shared:///var/lib/x/local_fallback"


@pytest.mark.parametrize("line", ["record: off", "record: no", 'record: "off"'])
def test_records_are_in_the_data_folder_or_off(line: str, tmp_path: Path) -> None:
    """YAML reads `off` as false, which means the same."""
    assert (
        ServiceSettings.gather({"data": str(tmp_path)}).record == f"sqlite:///{tmp_path}/records.db"
    )
    config = tmp_path / "config.yaml"
    config.write_text(f"{line}\nsample: 1\nkeep-usage: 30\nrecord-subjects: hashed\n")
    settings = ServiceSettings.gather({}, str(config))
    assert (settings.record, settings.sample, settings.keep_usage) == ("off", 1.0, 30)
    assert settings.record_subjects == "hashed"


@pytest.mark.parametrize(
    ("peers", "addresses"),
    [
        ([], ()),
        (["store"], ()),
        (["dns:nodes.example:7946"], ("nodes.example:7946",)),
        (["10.0.0.6:7946, [::1]:7946"], ("10.0.0.6:7946", "[::1]:7946")),
        (["10.0.0.6:7946", "10.0.0.7:7946"], ("10.0.0.6:7946", "10.0.0.7:7946")),
    ],
)
def test_fleet_settings(peers: list[str], addresses: tuple[str, ...], tmp_path: Path) -> None:
    """All options reach the fleet. Its table is a file in the data folder, for all workers."""
    settings = ServiceSettings.gather(
        {
            "data": str(tmp_path),
            "store": "redis://cache",
            "nodes": 20,
            "gossip": "10.0.0.5:7946",
            "gossip_key": "/etc/gossip.key",
            "peers": peers,
            "lease_seconds": 2.0,
            "flush_seconds": 0.5,
            "warm": 0.4,
            "dead_seconds": 3.0,
            "allowances": 5_000,
        }
    )
    assert settings.fleet == Fleet(
        store=f"shared://{tmp_path}/fleet?capacity=1000&allowances=5000",
        nodes=20,
        gossip="10.0.0.5:7946",
        key_file="/etc/gossip.key",
        peers=addresses,
        lease_seconds=2.0,
        flush_seconds=0.5,
        warm=0.4,
        dead_seconds=3.0,
    )


def test_a_fleet_needs_a_store_that_machines_share() -> None:
    """With one, it is on by default, without gossip."""
    assert ServiceSettings.gather({}).fleet is None
    remote = ServiceSettings.gather({"store": "redis://cache"}).fleet
    assert remote is not None
    assert (remote.gossip, remote.nodes, remote.lease_seconds) == (None, 1, 1.0)


def test_local_fallback_settings(tmp_path: Path) -> None:
    """All options of the local fallback reach it."""
    settings = ServiceSettings.gather(
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
    assert ServiceSettings.gather({"data": str(tmp_path)}, None).local_fallback == LocalFallback()


def test_user_without_a_home_must_give_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a numeric user id."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)
    with pytest.raises(ConfigError, match="--data /var/lib/ratekeeper"):
        ServiceSettings.gather({})
    with pytest.raises(ConfigError, match="no home directory"):
        ServiceSettings.gather({"data": "~nobody-of-this-name/data"})
