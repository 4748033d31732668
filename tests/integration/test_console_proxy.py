"""The console behind a real nginx that ends TLS, with the configuration of docs/console.md."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from tests.console.operators import RULES, ConsoleService
from tests.nginx_process import Nginx
from tests.redis_servers.certificates import make_certificates
from tests.service.console.client import CSRF

PAGE = Path(__file__).parents[2] / "docs" / "console.md"

CONFIG = """events {}
http {
    server {
        listen 127.0.0.1:10080 ssl;
        ssl_certificate %s;
        ssl_certificate_key %s;
        %s
    }
}
"""


def test_the_console_behind_nginx(tmp_path: Path) -> None:
    """The cookie is Secure, forms are accepted, and live events are not held back."""
    made = make_certificates(tmp_path)
    found = re.search(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    with ConsoleService(RULES, "--trusted-proxy", "127.0.0.1") as service:
        location = found[1].replace("http://127.0.0.1:8080", service.url)
        config = CONFIG % (made.server_cert_path, made.server_key_path, location)
        with Nginx(config) as nginx:
            url = nginx.url.replace("http://", "https://")
            with httpx.Client(base_url=url, verify=False, trust_env=False, timeout=60) as browser:
                answer = browser.post("/console/login", data={"token": service.tokens["read"]})
                assert answer.status_code == 303, answer.text
                assert "Secure" in answer.headers["set-cookie"]
                csrf = CSRF.search(browser.get("/console/audit").text)
                assert csrf
                with browser.stream("GET", "/console/live") as events:
                    assert events.headers["content-type"].startswith("text/event-stream")
                    assert next(events.iter_text())
                sent = {"data": {"csrf": csrf[1]}, "headers": {"Origin": url}}
                assert browser.post("/console/logout", **sent).status_code == 303
                assert browser.get("/console/audit").status_code == 303
