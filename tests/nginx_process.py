"""A real nginx on loopback, with the example's configuration."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

from tests.gateway_process import Gateway
from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.server import ServerFailed
from tests.redis_servers.waiting import until

EXAMPLE = Path(__file__).parents[1] / "examples/nginx.conf"
READY_SECONDS_MAX = 20.0
_PORTS_TRIED_MAX = 5
_PORT_TAKEN = "Address already in use"
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def nginx_path() -> str:
    """Return the path of nginx. On Debian it is in a folder that only root has in its PATH."""
    path = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if path is None:
        raise ServerFailed(
            "nginx is not installed, and tests against a real nginx need it; as root on "
            "Debian or Ubuntu: apt-get install nginx-light"
        )
    return path


def example(application_port: int, ratekeeper_port: int) -> str:
    """Return the example's configuration with these ports."""
    text = EXAMPLE.read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8000;", f"{HOST}:{application_port};")
    return text.replace("127.0.0.1:8080;", f"{HOST}:{ratekeeper_port};")


class Nginx(Gateway):
    """One nginx in the foreground with one worker, which listens at `url`."""

    def __init__(self, config: str) -> None:
        super().__init__("nginx")
        self.url = ""
        self._config = config

    def start(self) -> None:
        """Start nginx and wait until it listens. Try another port if this one was taken."""
        for _ in range(_PORTS_TRIED_MAX):
            port = free_port()
            self._launch_on(port)
            until(
                lambda at=port: self._ended() or _listens(at),  # type: ignore[misc]  # binds this port
                f"nginx listens on port {port}",
                READY_SECONDS_MAX,
                self._log_end,
            )
            if not self._ended():
                self.url = f"http://{HOST}:{port}"
                return
            if _PORT_TAKEN not in self._log_end():
                break
        raise ServerFailed(f"nginx did not start. {self._log_end()}")

    def _launch_on(self, port: int) -> None:
        text = re.sub(r"127\.0\.0\.1:10080( ssl)?;", rf"{HOST}:{port}\1;", self._config)
        if "_temp_path" not in text:  # the example has paths of its own
            # nginx writes only to its folder; the distribution's paths may not be writable.
            paths = "".join(f"    {name}_temp_path {name};\n" for name in _TEMPORARY)
            text = text.replace("http {\n", f"http {{\n    access_log off;\n{paths}", 1)
            text = f"pid nginx.pid;\n{text}"
        (self.folder / "nginx.conf").write_text(text, encoding="utf-8")
        directives = "daemon off; error_log stderr warn;"
        if os.geteuid() == 0:
            directives += " user root;"  # otherwise its worker may not write to root's folder
        self._launch([nginx_path(), "-p", self.folder, "-c", "nginx.conf", "-g", directives])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
