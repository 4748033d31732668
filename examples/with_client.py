"""A client that honours Retry-After: it sends more requests than the limit, and none fails."""

from __future__ import annotations

import math
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from ratekeeper import Limiter
from ratekeeper.httpx import RetryTransport

REQUESTS = 9
# Three at once, then three per second.
limiter = Limiter("3/second")


class Orders(BaseHTTPRequestHandler):
    """A server with a limit, which answers with Retry-After."""

    protocol_version = "HTTP/1.1"
    refused = 0

    def do_GET(self) -> None:
        decision = limiter.check(self.client_address[0])
        self.send_response(200 if decision else 429)
        if not decision:
            Orders.refused += 1
            self.send_header("Retry-After", str(math.ceil(decision.retry_after)))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def main() -> int | str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Orders)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/orders"
    try:
        with httpx.Client(transport=RetryTransport(wait_max=30)) as client:
            answers = [client.get(url).status_code for _ in range(REQUESTS)]
    finally:
        server.shutdown()
        server.server_close()
    print(f"{REQUESTS} requests: {answers.count(200)} answered, after {Orders.refused} refusals")
    return (
        0
        if answers == [200] * REQUESTS and Orders.refused
        else "every request should pass in the end"
    )


if __name__ == "__main__":
    sys.exit(main())
