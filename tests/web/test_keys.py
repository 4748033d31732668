"""Keys: no client is taken for another, whatever it sends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.web.asgi_driver import scope_of
from tollkeeper import Request
from tollkeeper.core.subjects import subject_of
from tollkeeper.web import keys
from tollkeeper.web.calls import AsgiCall
from tollkeeper.web.identity import Identity
from tollkeeper.web.keys import Keys
from tollkeeper.web.terms import Terms


def _keys(**options: Any) -> Keys:
    terms = Terms(limits="1/s", **options)
    found = terms.identify
    return Keys(terms, found if isinstance(found, Identity) else Identity(), has_rules=False)


def _call(query: str = "", peer: str = "192.0.2.1", **headers: str) -> AsgiCall:
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return AsgiCall(scope_of(headers=pairs, peer=peer, query_string=query.encode()))


@pytest.mark.parametrize(
    ("options", "call", "key"),
    [
        ({}, _call(), "address:192.0.2.1"),
        ({"key": "header:X-Key"}, _call(x_key="a"), "header:x-key:a"),
        ({"key": "header:X-Key"}, _call(), "anonymous:*"),
        ({"key": ["header:X-Key", "address"]}, _call(), "address:192.0.2.1"),
        ({"key": ["query:a", "query:a:b"]}, _call("a=1"), ("query:a", "1")),
        ({"key": lambda call: None}, _call(), ("address", "192.0.2.1")),
        ({"per_route": True}, _call(), ("address", "192.0.2.1", "/")),
    ],
)
def test_a_key_is_one_piece_where_that_cannot_be_mistaken(
    options: dict[str, Any], call: AsgiCall, key: object
) -> None:
    """And a tuple where another source, or the application, could make the same text."""
    made = _keys(**options)
    assert (made.of(call) if made.hook is None else made.of_hook(made.hook(call), call)) == key


@given(
    st.lists(st.sampled_from(["query:a", "query:a:b", "query:a:b:c", "header:x"]), min_size=1),
    st.dictionaries(st.sampled_from(["a", "a:b", "a:b:c"]), st.sampled_from(["b:c", "c", "1"])),
    st.dictionaries(st.sampled_from(["a", "a:b", "a:b:c"]), st.sampled_from(["b:c", "c", "1"])),
)
def test_different_clients_have_different_keys(
    sources: list[str], one: dict[str, str], two: dict[str, str]
) -> None:
    """Two calls share a subject only if the same source found the same value."""
    made = _keys(key=sources[:16])

    def found(fields: dict[str, str]) -> tuple[str, str] | None:
        for source in sources[:16]:
            kind, _, name = source.partition(":")
            if kind == "query" and name in fields:
                return source, fields[name]
        return None

    calls = [
        _call("&".join(f"{name}={value}" for name, value in each.items())) for each in (one, two)
    ]
    subjects = [subject_of(key) for key in map(made.of, calls) if not isinstance(key, Request)]
    assert (subjects[0] == subjects[1]) == (found(one) == found(two))


def test_a_hook_cannot_be_made_to_name_an_address() -> None:
    """A client that sends the text of somebody's address is not counted as that address."""
    made = _keys(key=lambda call: call.header("x-user"))
    spoofed, own = made.of_hook("address:192.0.2.1", _call()), made.of_hook(None, _call())
    assert not isinstance(spoofed, Request)
    assert not isinstance(own, Request)
    assert subject_of(spoofed) != subject_of(own)


def test_what_is_remembered_of_peers_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many addresses there are, and a key is the same before and after."""
    monkeypatch.setattr(keys, "PEERS_MAX", 4)
    made = _keys()
    for number in range(20):
        call = _call(peer=f"192.0.2.{number}")
        assert made.of(call) == made.of(call) == f"address:192.0.2.{number}"
        assert made.by_peer is not None
        assert len(made.by_peer) <= 4


def test_a_peer_that_may_be_a_proxy_is_not_remembered_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its first request may be for itself: the operator is told when it forwards one of others."""
    made = _keys()
    calls = [_call(peer="10.0.0.9"), _call(peer="10.0.0.9", x_forwarded_for="192.0.2.1")]
    assert [made.of(call) for call in (*calls, *calls)] == ["address:10.0.0.9"] * 4
    assert len(caplog.messages) == 1
    assert made.by_peer == {"10.0.0.9": "address:10.0.0.9"}


@pytest.mark.parametrize(
    "options",
    [
        {"trusted_proxies": ["loopback"]},
        {"identify": Identity(trusted_proxies=["loopback"])},
        {"per_route": True},
        {"key": ["header:X-Key", "address"]},
        {"key": lambda call: None},
    ],
)
def test_a_peer_is_remembered_only_where_it_alone_says_the_key(options: dict[str, Any]) -> None:
    """Behind a proxy, one peer is many clients."""
    assert _keys(**options).by_peer is None
