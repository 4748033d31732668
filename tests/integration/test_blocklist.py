"""From denials of a real service with two workers to a 403 of a real nginx."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.cli.stub_service import run
from tests.nginx_process import Nginx, nginx_path
from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import ServiceProcess

pytestmark = pytest.mark.server

SECONDS_MAX = 75.0
# Each client's address comes from a header, because all requests come from this machine.
NGINX = """
events {}
http {
    server {
        listen 127.0.0.1:10080;
        set_real_ip_from 127.0.0.1;
        real_ip_header X-Real-IP;
        include blocked.conf;
        location / { try_files /nothing @ok; }
        location @ok { return 200 "ok"; }
    }
}
"""


def test_an_address_that_is_denied_again_and_again_is_cut_off(tmp_path: Path) -> None:
    """An IPv4 address and the /64 of an IPv6 address, but not an allowed one."""
    secrets = secrets_of(tmp_path)
    rules = {
        "version": 1,
        "allow": ["192.0.2.9"],
        "rules": [{"id": "api", "by": ["ip"], "limits": ["1/hour"]}],
    }
    options = ("--tokens", str(tmp_path / "tokens.json"), "--record", f"sqlite:///{tmp_path}/r.db")
    nginx = Nginx(NGINX)
    path = nginx.folder / "blocked.conf"
    with ServiceProcess(rules, *options, workers=2) as service:
        headers = {"Authorization": f"Bearer {secrets['admin']}"}
        addresses = ("192.0.2.7", "2001:db8::7", "192.0.2.9")
        checks = [{"ip": address} for address in addresses for _ in range(30)]
        arguments = (
            "blocklist",
            "--format",
            "nginx",
            "--output",
            str(path),
            "--at-least",
            "100",
            "--timeout",
            "60",
        )

        def listed() -> bool:
            # Each on a new connection, so that both workers get some.
            service.ask("POST", "/v1/check/batch", {"checks": checks}, headers)
            made = run(*arguments, url=service.url, TOKEN=secrets["read"])
            assert made.exit_code == 0, made.output
            return path.read_text().count("deny ") == 2

        until(listed, "both addresses are listed", SECONDS_MAX, path.read_text)
    found = path.read_text()
    assert "deny 192.0.2.7; # until " in found
    assert "deny 2001:db8::/64; # until " in found
    with nginx:
        command = [nginx_path(), "-t", "-p", nginx.folder, "-c", "nginx.conf"]
        tested = subprocess.run(command, capture_output=True, check=False)
        assert tested.returncode == 0, tested.stderr.decode()
        statuses = {
            address: httpx.get(nginx.url, headers={"X-Real-IP": address}).status_code
            for address in ("192.0.2.7", "192.0.2.9", "2001:db8::1234", "2001:db8:0:1::1")
        }
    assert list(statuses.values()) == [403, 200, 403, 200], json.dumps(statuses)
