"""Check limits from a program in any language, over HTTP.

`ratekeeper serve` keeps the rules and the counts, and programs ask it: `POST /v1/check`. This one
starts the service itself; in production it runs on its own, on each machine or behind an address,
with tokens (`ratekeeper token create shop --role check`).

- Keep the connection, and set a timeout. A limiter that is slow must not make the program slow.
- Decide what happens while the service is away: here pages pass and logins do not.
- The trap is `if answer.status == 429: deny`. A misspelt field (400) or a wrong token (401) then
  lets everything pass, and no error shows it. Only 200 means yes, and 429, 403 and 503 no. Anything
  else is a mistake of this program, and raises.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

RULES = """
version: 1
rules:
  - {id: login, match: {endpoint: /login}, by: ip, limits: 2 in any hour, on_failure: closed}
  - {id: api, by: user, limits: 5/hour}
deny: ["user:mallory"]
"""


class Limits:
    """The client of the service. All threads of a program may share it."""

    def __init__(self, url: str, token: str = "", timeout: float = 0.2) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=timeout)

    def allows(self, *, closed: bool = False, **request: str) -> bool:
        """Return True if the request may pass, and spend its units.

        `closed`: what the answer is while the service is away. Send values that you have verified:
        the service believes the user and the address that it gets.
        """
        try:
            answer = self.http.post("/v1/check", json=request)
        except httpx.TransportError:  # away, or slower than the timeout
            return not closed
        if answer.status_code in {403, 429, 503} and "allowed" in answer.json():
            return False  # answer.headers["Retry-After"] says how long, except on the deny list
        answer.raise_for_status()
        return True


@contextmanager
def service() -> Iterator[str]:
    """Start the service on a free port. Yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder, "limits.yaml")
        rules.write_text(RULES, encoding="utf-8")
        options = ["--rules", str(rules), "--data", folder, "--port", "0", "--workers", "1"]
        options += ["--no-grpc", "--record", "off", "--drain-seconds", "0"]
        command = [sys.executable, "-m", "ratekeeper", "serve", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            events = (json.loads(line) for line in process.stderr)
            try:
                yield next(event["url"] for event in events if event["event"] == "started")
            finally:
                process.terminate()


def main() -> None:
    with service() as url:
        limits = Limits(url, timeout=10)  # this program may run on a busy machine
        answers = [limits.allows(user="ann", endpoint="/orders") for _ in range(8)]
        print(f"ann: {answers.count(True)} of 8 pass")
        assert answers == [True] * 5 + [False] * 3
        assert not limits.allows(user="mallory", endpoint="/orders")
        try:
            limits.allows(usr="ann", endpoint="/orders")
        except httpx.HTTPStatusError as error:
            print("a misspelt field:", error.response.json()["detail"])
        else:
            raise AssertionError("a misspelt field was accepted")

    # The service is away.
    assert limits.allows(user="ann", endpoint="/orders")
    assert not limits.allows(closed=True, ip="192.0.2.1", endpoint="/login")
    print("while the service is away, orders pass and logins do not")


if __name__ == "__main__":
    main()
