"""Make the screenshots of the documentation from a running console.

    .venv/bin/python -m tools.screenshot                 # docs/console.png and the others
    .venv/bin/python -m tools.screenshot --seconds 20 --folder /tmp/shots

It starts a service with the example rules, sends mixed requests for some time, logs in with a
one-time link, and takes pictures of pages in Chromium, light and dark. Run it from the top folder.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from playwright.sync_api import Browser, Page
from tests.console.operators import ConsoleService, Operator, chromium
from tests.service_process import ask_on

from ratekeeper.service.console.sessions import Sessions

ROOT: Final = Path(__file__).resolve().parent.parent
BYTES_MAX: Final = 200_000
WIDTH, HEIGHT = 1280, 900
THREADS: Final = 4
# The picture, its page, and the colours.
PICTURES: Final = (
    ("console.png", "", "light"),
    ("console-dark.png", "", "dark"),
    ("console-rules.png", "/rules", "light"),
)


def requests(random_: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the requests of an imaginary shop: many orders and searches, a few attacks."""
    keys = [f"sk_shop_{number}" for number in range(40)]
    tenants = ["acme", "globex", "initech", "umbrella"]
    for _ in itertools.count():
        key, tenant = random_.choice(keys[: random_.choice((3, 40))]), random_.choice(tenants)
        yield random_.choices(
            (
                {"api_key": key, "endpoint": "/v1/orders/7", "method": "POST", "tenant": tenant},
                {"api_key": key, "endpoint": "/v1/search", "tenant": tenant},
                {"api_key": key, "endpoint": "/v1/items", "tenant": tenant, "user": "42"},
                {"ip": "198.51.100.7", "endpoint": "/login", "method": "POST"},
                {"ip": f"192.0.2.{random_.randrange(2)}", "attributes": {"agent": "a bot"}},
                {"tenant": tenant, "user": "7", "endpoint": "/v1/reports/1"}
                | {"attributes": {"format": "pdf"}},
                {"api_key": "sk_revoked_1", "endpoint": "/v1/orders/7"},
            ),
            weights=(30, 30, 25, 4, 12, 2, 1),
        )[0]


class Load:
    """Sends requests from several threads, in waves, until the block ends."""

    def __init__(self, service: ConsoleService) -> None:
        self._service = service
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(THREADS)]

    def __enter__(self) -> None:
        for each in self._threads:
            each.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for each in self._threads:
            each.join()

    def _send(self, seed: int) -> None:
        connection = self._service.connect()
        headers: Mapping[str, str] = self._service.bearer("check")
        for request in requests(random.Random(seed)):
            wave = 1 + 0.6 * math.sin(time.monotonic() / 9 + seed / 2)
            if self._ended.wait(0.02 / wave):
                break
            ask_on(connection, "POST", "/v1/check", request, headers)
        connection.close()


def take(browser: Browser, service: ConsoleService, folder: Path, names: list[str]) -> None:
    """Log in and take the named pictures, or all."""
    for colours in ("light", "dark"):
        operator = Operator(
            browser,
            service,
            viewport={"width": WIDTH, "height": HEIGHT},
            color_scheme=colours,
            locale="en-GB",
            timezone_id="Europe/Berlin",
        )
        operator.open(f"/link/{Sessions.of(service.data).make_link('ann', 'admin')}")
        for name, path, wanted in PICTURES:
            if wanted == colours and (not names or name in names):
                page = operator.open(path)
                if path == "/rules":
                    preview(page)
                save(page, folder / name)
        operator.close()


def preview(page: Page) -> None:
    """Type a change of the rules, and ask what it would have done."""
    page.locator(".cm-line", has_text="default: [60/minute]").click()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    for _ in "60/minute":
        page.keyboard.press("Backspace")
    page.keyboard.type("30/minute")
    page.get_by_role("button", name="What would it have done?").click()
    heading = page.get_by_role("heading", name="What it would have done")
    heading.wait_for()
    heading.evaluate("e => e.scrollIntoView()")


def save(page: Page, file: Path) -> None:
    """Take a picture of the page, when its charts are drawn."""
    page.wait_for_load_state("load")
    page.wait_for_timeout(4_000)
    page.screenshot(path=file, animations="disabled")
    size = file.stat().st_size
    if size > BYTES_MAX:
        raise SystemExit(f"{file} has {size:,} bytes; at most {BYTES_MAX:,} are wanted")
    print(f"{file}: {size:,} bytes")


def main() -> None:
    """Make the screenshots."""
    parser = argparse.ArgumentParser(description="Make the screenshots of the documentation.")
    parser.add_argument("--seconds", type=float, default=125.0, help="how long load is sent first")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where they are written")
    parser.add_argument("names", nargs="*", help="the pictures to make; all by default")
    given = parser.parse_args()
    rules = yaml.safe_load((ROOT / "examples" / "limits.yaml").read_text(encoding="utf-8"))
    with ConsoleService(rules, workers=2) as service, chromium() as browser, Load(service):
        time.sleep(given.seconds)
        take(browser, service, given.folder, given.names)


if __name__ == "__main__":
    main()
