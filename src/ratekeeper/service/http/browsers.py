"""Requests of web pages, which a service without tokens rejects.

Without a token file, every program on this machine may use the service. A browser on this machine
runs programs of strangers: web pages. Two headers of a request show that a page sends it.

`Origin`  A browser sends it with every request of a page that could spend units. The page cannot
          read the reply, but the units would be spent. The pages of the service itself, /docs and
          the console, may call it: their Origin is the scheme and the Host of the request, and the
          Host is an address or `localhost`, which no page of a stranger can have.
`Host`    The name in the page's URL. A page of evil.example whose name resolves to 127.0.0.1 (DNS
          rebinding) is of the same origin as the service: it could read every reply, and a GET has
          no `Origin`. A service that only this machine can reach is called by an address or as
          `localhost`, so any other name is rejected. An address cannot be rebound.

A gateway forwards the `Origin` of its client to `/v1/authorize`. It also names the client's URI in
a header, which a page of another origin cannot set: the browser would ask the service first, and
the service does not agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final

from ratekeeper.core.errors import show
from ratekeeper.service.http.tokens import TokenRejection, Tokens

# Hosts that were accepted are remembered, so that most requests are checked by one look-up.
ACCEPTED_MAX: Final = 64
AUTHORIZE: Final = "/v1/authorize"
_CONSOLE: Final = "/console/"
# The headers in which a gateway names its client's URI.
GATEWAY_HEADERS: Final = (b"x-original-uri", b"x-forwarded-uri")

_HOST: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")
_ADVICE: Final = (
    "call it from a program, or make a token: ratekeeper token create NAME --role check"
)
_FROM_PAGE: Final = TokenRejection(
    403,
    "the Origin header shows that a web page of another origin sends this, which a service without "
    f"tokens does not permit; {_ADVICE}",
)


class BrowserGuard:
    """Finds the requests of web pages, as long as the service requires no token."""

    def __init__(self, tokens: Tokens, *, loopback: bool) -> None:
        """`loopback`: only this machine can reach the service, so it has no other name."""
        self.accepted: set[bytes | None] = set()
        """Hosts that need no further look."""
        self._tokens = tokens
        self._loopback = loopback

    def rejection(
        self, path: str, headers: Mapping[bytes, bytes], scheme: str = "http"
    ) -> TokenRejection | None:
        """Return why a request is rejected; None if no page of another origin can have sent it."""
        host = headers.get(b"host")
        if not self._tokens.required:
            if self._loopback and host is not None and not is_own_host(host.decode("latin-1")):
                return TokenRejection(
                    403,
                    f"the Host header is {show(host.decode('latin-1'))}, but this service is on "
                    f"this machine only and requires no token: a web page could use another name "
                    f"to reach it; send `Host: localhost`, or make a token: "
                    f"ratekeeper token create NAME --role check",
                )
            from_gateway = path == AUTHORIZE and any(map(headers.get, GATEWAY_HEADERS))
            has_origin = b"origin" in headers and not from_gateway
            if has_origin and not _is_own_origin(path, headers, scheme):
                return _FROM_PAGE
        if host is not None and len(self.accepted) < ACCEPTED_MAX:
            self.accepted.add(host)
        return None


def _is_own_origin(path: str, headers: Mapping[bytes, bytes], scheme: str) -> bool:
    """Return True if a page of this service sent the request.

    A service for other machines accepts any Host, and a name can be rebound to its address. So a
    page of the service that was opened by a name is rejected there. The console is not: whatever
    its name, and behind a proxy that ends TLS, its forms need a session.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    origin = headers[b"origin"].decode("latin-1")
    if path.startswith(_CONSOLE):
        return origin.partition("://")[2] == host
    return origin == f"{scheme}://{host}" and is_own_host(host)


def is_own_host(host: str) -> bool:
    """Return True if no web page of a stranger can have this Host: an address, or localhost.

    >>> is_own_host("127.0.0.1:8080"), is_own_host("LOCALHOST"), is_own_host("[::1]:80")
    (True, True, True)
    >>> is_own_host("evil.example:8080"), is_own_host("localhost.evil.example")
    (False, False)
    """
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found["name"]
    # Browsers resolve these names to this machine themselves (RFC 6761).
    if name is not None and (name.lower() == "localhost" or name.lower().endswith(".localhost")):
        return True
    try:
        ip_address(found["v6"] if name is None else name)
    except ValueError:
        return False
    return True
