"""Whom a guard counts: a call becomes a key for limits, or a Request for rules.

A key that sources find is `"address:192.0.2.1"`: one piece, which a store decides fastest. It is a
tuple where one piece could be mistaken: beside a hook of the application's, whose keys may look
like anything, and for sources such as `query:a` and `query:a:b`. With `per_route` the route is one
more part. Where the address is the peer's and nothing else is asked for, keys are remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from tollkeeper.core.model import Request
from tollkeeper.core.subjects import Key
from tollkeeper.rules.matching.patterns import normalised
from tollkeeper.web.calls import Call, digest_of
from tollkeeper.web.claims import Claim
from tollkeeper.web.identity import NOBODY, Compiled, Identity, Source
from tollkeeper.web.terms import Terms

# A longer path is hashed, so that it is a key like any other.
ROUTE_LENGTH_MAX: Final = 200
# Addresses whose keys are remembered; all are forgotten when there are more. About 2 MB.
PEERS_MAX: Final = 10_000


class Keys:
    """Whom a guard counts, on its terms."""

    def __init__(self, terms: Terms, identity: Identity, has_rules: bool) -> None:
        key = terms.key
        self.hook: Callable[[Call], Any] | None = (
            key if callable(key) and not isinstance(key, Claim) else None
        )
        """The application's own function; what it returns goes through `of_hook`."""
        self._identity = identity
        self._has_rules = has_rules
        self._per_route = terms.per_route
        self._by_request = key is None and has_rules
        # Checked and compiled once; a text is one source, and the address is what all have.
        self._sources = identity.compiled(
            "address" if key is None or self.hook is not None else cast("Source", key)
        )
        self._one_piece = self.hook is None and not _ambiguous(self._sources)
        by_address = self._one_piece and [each.label for each in self._sources] == ["address"]
        plain = not (self._by_request or self._per_route or terms.trusted_proxies)
        own = not isinstance(terms.identify, Identity)  # which may have proxies of its own
        self.by_peer: dict[str, str] | None = {} if by_address and plain and own else None
        """Keys by peer, where it alone says them; else None."""

    def of(self, call: Call) -> Key | Request:
        """Who is counted, where no hook says it."""
        if self._by_request:
            return self._identity.request_of(call)
        if self.by_peer is None:
            return self._looked_for(call)
        peer = call.peer
        return (self.by_peer.get(peer) if peer else None) or self._learnt(peer, call)

    def of_hook(self, found: Any, call: Call) -> Key | Request:
        """Who is counted, of what the application's own hook found."""
        if found is None:
            return self._identity.request_of(call) if self._has_rules else self._looked_for(call)
        if not self._per_route or isinstance(found, Request):
            return cast("Key", found)
        parts = found if isinstance(found, tuple) else (found,)
        return (*parts, _route_of(call))

    def _learnt(self, peer: str | None, call: Call) -> Key:
        """The key of an address that was not seen for a while."""
        key = self._looked_for(call)
        if peer is None or self.by_peer is None or not self._identity.knows(peer):
            return key
        if isinstance(key, str):
            if len(self.by_peer) >= PEERS_MAX:
                self.by_peer.clear()
            self.by_peer[peer] = key
        return key

    def _looked_for(self, call: Call) -> Key:
        who, value = NOBODY
        for label, read in self._sources:
            found = read(call)
            if found is not None:
                who, value = label, found
                break
        if self._per_route:
            return who, value, _route_of(call)
        return f"{who}:{value}" if self._one_piece else (who, value)


def _ambiguous(sources: tuple[Compiled, ...]) -> bool:
    """Whether "label:value" of one source may be that of another: query:a and query:a:b."""
    labels = [source.label for source in sources]
    return any(
        other.startswith(f"{label}:") for label in labels for other in labels if other != label
    )


def _route_of(call: Call) -> str:
    """The route's template, or the path; short enough for a key, whatever a client sends."""
    route = call.route or normalised(call.path)
    if 0 < len(route) <= ROUTE_LENGTH_MAX and route.isascii() and route.isprintable():
        return route
    return digest_of(route)
