"""Identity: sources find the client's key, and no two clients share a key."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jwt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper import ConfigError, Limiter, Request
from ratekeeper.core.subjects import subject_of
from ratekeeper.web import identity as identities
from ratekeeper.web.claims import Claim
from ratekeeper.web.identity import ANONYMOUS, Identity, RequestKeys
from ratekeeper.web.requests import AsgiRequest, WebRequest, WsgiRequest, digest_of
from tests.test_fuzz_entries import ANYTHING
from tests.web.asgi_driver import scope_of

PEER = "203.0.113.9"


def request_with(
    headers: dict[str, str] | None = None, query: str = "", path: str = "/", **more: Any
) -> AsgiRequest:
    """Return a request with these headers and this query."""
    raw = [(name.lower().encode(), v.encode("latin-1")) for name, v in (headers or {}).items()]
    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "headers": raw,
        "client": (PEER, 1),
    }
    return AsgiRequest(scope | more)


def unsigned(claims: dict[str, Any]) -> str:
    """Return a token as an application behind a gateway receives it."""
    return f"x.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()}.x"


# ------------------------------------------------------------------------------------ sources


@pytest.mark.parametrize(
    ("source", "web_request", "key"),
    [
        (
            "header:X-API-Key",
            request_with({"X-API-Key": " sk_1 "}),
            ("header:x-api-key", "sk_1"),
        ),
        ("bearer", request_with({"Authorization": "Bearer t"}), ("bearer", digest_of("t"))),
        (
            "header:Authorization",
            request_with({"Authorization": "Basic t"}),
            ("header:authorization", digest_of("Basic t")),
        ),
        ("header:cookie", request_with({"Cookie": "a=1"}), ("header:cookie", digest_of("a=1"))),
        ("query:key", request_with(query="key=sk%5F1"), ("query:key", "sk_1")),
        ("cookie:sid", request_with({"Cookie": "sid=7"}), ("cookie:sid", digest_of("7"))),
        ("session:user_id", request_with(session={"user_id": 42}), ("session:user_id", "42")),
        (
            "unverified_claim:sub",
            request_with({"Authorization": f"Bearer {unsigned({'sub': '42'})}"}),
            ("unverified_claim:sub", "42"),
        ),
        ("address", request_with(), ("address", PEER)),
        (lambda web_request: web_request.method, request_with(), ("custom:1", "POST")),
        (lambda web_request: 42, request_with(), ("custom:1", "42")),
    ],
)
def test_each_source_is_a_key(source: Any, web_request: WebRequest, key: tuple[str, str]) -> None:
    """The source is part of the key; secrets are digested."""
    assert Identity().key_of(web_request, [source]) == key
    assert Identity().key_of(web_request, source) == key


@pytest.mark.parametrize(
    ("source", "web_request"),
    [
        ("header:X-API-Key", request_with({"X-API-Key": " "})),
        ("bearer", request_with({"Authorization": "Basic t"})),
        ("header:Authorization", request_with({"Authorization": " "})),
        ("query:key", request_with(query="key=%20")),
        ("cookie:sid", request_with({"Cookie": "sid="})),
        ("session:user_id", request_with(session={"user_id": True})),
        ("session:user_id", request_with(session={"user_id": object()})),
        ("session:user_id", request_with(session={})),
        ("unverified_claim:sub", request_with({"Authorization": "Bearer x"})),
        ("address", request_with(client=None)),
        (lambda web_request: None, request_with()),
        (lambda web_request: "  ", request_with()),
    ],
)
def test_an_empty_value_counts_as_absent(source: Any, web_request: WebRequest) -> None:
    """The next source is tried; requests without any value share one key."""
    assert Identity().key_of(web_request, [source]) == ANONYMOUS
    assert Identity().key_of(web_request, [source, lambda web_request: "x"]) == ("custom:2", "x")
    assert subject_of(ANONYMOUS)


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        ("header:X-API-Key", b"x-api-key", "{}"),
        ("header:Authorization", b"authorization", "Basic {}"),
        ("bearer", b"authorization", "Bearer {}"),
        ("unverified_claim:sub", b"authorization", "Bearer {}"),
        (Claim("sub", unverified=True, header="X-Token"), b"x-token", "{}"),
        ("query:key", None, "key={}"),
        ("cookie:sid", b"cookie", "sid={}"),
    ],
)
def test_a_repeated_value_is_not_a_new_client(source: Any, name: bytes | None, value: str) -> None:
    """Such requests share one count, or the value counts as absent."""

    def key_of(*values: str) -> tuple[str, str]:
        texts = [value.format(each).encode() for each in values]
        headers = [] if name is None else [(name, each) for each in texts]
        query = b"&".join(texts) if name is None else b""
        scope = {"type": "http", "headers": headers, "query_string": query, "client": (PEER, 1)}
        return Identity().key_of(AsgiRequest(scope), [source, "address"])

    own, *made_up = [unsigned({"sub": each}) for each in ("own", "a", "b", "c")]
    found = {key_of(own, each) for each in made_up} | {key_of(each, own) for each in made_up}
    assert len(found) == 1
    assert found.isdisjoint({key_of(own), key_of(made_up[0])})
    assert key_of(own, own) == key_of(own)


def test_an_empty_request_has_no_values() -> None:
    """No source raises an error."""
    sources = [
        "header:x",
        "bearer",
        "unverified_claim:x",
        "query:x",
        "cookie:x",
        "session:x",
        "address",
    ]
    assert Identity().key_of(AsgiRequest({"type": "http"}), sources) == ANONYMOUS
    assert Identity().key_of(WsgiRequest({}), tuple(sources)) == ANONYMOUS


def test_the_first_source_that_finds_a_value_wins() -> None:
    """Sources are tried in the order in which they are written."""
    sources = ["header:X-API-Key", "session:user", "address"]
    both = request_with({"X-API-Key": "sk_1"}, session={"user": "u"})
    identity = Identity()
    assert identity.key_of(both, sources) == ("header:x-api-key", "sk_1")
    assert identity.key_of(both, sources[1:]) == ("session:user", "u")
    assert identity.key_of(request_with(), sources) == ("address", PEER)


def test_a_missing_session_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """All clients would share one count. An empty session is not logged."""
    identity = Identity({"user": "session:of_this_test"})
    assert identity.request_of(request_with(session={})).user is None
    assert caplog.messages == []
    for _ in range(2):
        assert identity.request_of(request_with()).user is None
    assert [message.partition(" finds no")[0] for message in caplog.messages] == [
        "session:of_this_test"
    ]


def test_the_same_value_from_two_sources_is_two_keys() -> None:
    """A header cannot imitate another client's query field."""
    web_request = request_with({"X-Key": "7"}, query="key=7")
    identity = Identity()
    assert identity.key_of(web_request, "header:X-Key") != identity.key_of(web_request, "query:key")
    first, second = (lambda web_request: None), (lambda web_request: "7")
    assert identity.key_of(web_request, [first, second]) == ("custom:2", "7")


def test_a_verified_claim_is_a_source() -> None:
    """An invalid token counts as absent, and the next source is tried."""
    claim = Claim("sub", key="s" * 32, algorithms=["HS256"])
    identity = Identity({"user": [claim, "header:X-User"]})
    good = jwt.encode({"sub": "42"}, "s" * 32, algorithm="HS256")
    forged = jwt.encode({"sub": "42"}, "f" * 32, algorithm="HS256")
    said = {"X-User": "guest"}
    assert (
        identity.request_of(request_with({"Authorization": f"Bearer {good}"} | said)).user == "42"
    )
    assert (
        identity.request_of(request_with({"Authorization": f"Bearer {forged}"} | said)).user
        == "guest"
    )
    assert claim.rejected == 1
    assert (
        identity.key_of(request_with({"Authorization": f"Bearer {good}"}), claim)[0] == "claim:sub"
    )


def test_a_claim_in_text_must_say_that_it_is_not_verified() -> None:
    """Otherwise a client could choose its identity because of a word that was left out."""
    with pytest.raises(ConfigError, match=r"no key to verify.*Claim\('sub'.*unverified_claim:sub"):
        Identity({"user": "claim:sub"})


# ------------------------------------------------------------------------------------ requests


def test_identity_makes_a_request_for_rules() -> None:
    """Known names become fields, others attributes; ip, endpoint and method are always set."""
    identity = Identity(
        {
            "user": "session:user",
            "api_key": ("header:X-API-Key", "query:key"),
            "tenant": "header:X-Tenant",
            "tier": lambda web_request: "pro",
            "region": "header:X-Region",
            "device": "cookie:device",
        }
    )
    web_request = request_with(
        {"X-Region": "eu", "X-Tenant": "t1"},
        query="key=sk_1",
        path="/v1/orders",
        session={"user": 7},
    )
    assert identity.request_of(web_request) == Request(
        user="7",
        api_key="sk_1",
        ip=PEER,
        tenant="t1",
        tier="pro",
        endpoint="/v1/orders",
        method="POST",
        attributes={"region": "eu"},
    )


@pytest.mark.parametrize(
    ("source", "headers"),
    [
        ("bearer", {"Authorization": "Bearer sk_revoked_1"}),
        ("cookie:key", {"Cookie": "key=sk_revoked_1"}),
        (lambda web_request: "sk_revoked_1" + "x" * 300, {}),
        ("header:X-Key", {"X-Key": "sk_revoked_1\x07"}),
    ],
)
@pytest.mark.parametrize("field", ["api_key", "user", "secret_attribute"])
def test_rules_match_a_value_that_is_counted_by_its_digest(
    source: Any, headers: dict[str, str], field: str
) -> None:
    """A key on the deny list is denied, however it is sent; the value is in no store and no log."""
    found = Identity({field: source}).request_of(request_with(headers))
    assert "sk_revoked" not in repr(found)
    limiter = Limiter.from_rules(
        {
            "version": 1,
            "rules": [{"id": "all", "by": [field], "limits": ["5/minute"]}],
            "deny": [f"{field}:sk_revoked_*"],
        }
    )
    assert limiter.evaluate(found).kind == "blocked"
    changed = replace(found, endpoint="/other")  # as a key function may do
    assert limiter.evaluate(changed).kind == "blocked"
    assert _keys(key=lambda web_request: None).of_hook(changed, request_with()) is changed
    other = replace(found, digests=None)
    [(subject, _)] = limiter.evaluate(other).counted
    assert subject.startswith(f"{field}:#")


def test_a_header_that_only_a_trusted_proxy_may_send() -> None:
    """From any other peer it counts as absent, so a client cannot choose its user."""
    identity = Identity(
        {"user": ["trusted_header:X-User", lambda web_request: "guest"]},
        trusted_proxies=["10.0.0.0/8", "unix"],
    )
    said = {"X-User": "ann"}
    for peer, user in (("10.0.0.1", "ann"), (PEER, "guest"), (None, "ann")):
        web_request = request_with(said, client=peer and (peer, 1))
        for _ in range(2):
            assert identity.request_of(web_request).user == user
    with pytest.raises(ConfigError, match="only trusted proxies may send, but none are configured"):
        Identity({"user": "trusted_header:X-User"})
    key = identity.key_of(request_with(said, client=("10.0.0.1", 1)), "trusted_header:X-User")
    assert key == ("trusted_header:x-user", "ann")


def test_a_source_function_sees_the_clients_address() -> None:
    """It is the address behind trusted proxies."""
    identity = Identity({"user": lambda web_request: web_request.address}, trusted_proxies=[PEER])
    web_request = request_with({"X-Forwarded-For": "198.51.100.7"})
    assert web_request.address == PEER
    assert identity.request_of(web_request).user == "198.51.100.7"


def test_without_fields_a_request_has_address_path_and_method() -> None:
    """They need no setting."""
    assert Identity().request_of(request_with(path="/a")) == Request(
        ip=PEER, endpoint="/a", method="POST"
    )


def test_a_route_takes_precedence_over_the_path() -> None:
    """If the route is known, /users/1 and /users/2 are one endpoint."""
    web_request = WsgiRequest({"PATH_INFO": "/users/1"}, route="/users/<id>")
    assert Identity().request_of(web_request).endpoint == "/users/<id>"


def test_the_settings_of_addresses_are_used() -> None:
    """Trusted proxies and the IPv6 prefix apply to the `ip` field."""
    web_request = request_with({"X-Forwarded-For": "2001:db8:1:2:3::4", "Forwarded": "for=1.2.3.4"})
    trusting = Identity(trusted_proxies=[PEER], ipv6_prefix=48, forwarded="x-forwarded-for")
    assert trusting.request_of(web_request).ip == trusting.address_of(web_request) == "2001:db8:1::"
    assert Identity().address_of(web_request) == PEER


@pytest.mark.parametrize("path", ["/a%1Fb", "/a%1fb", "/a\x1fb", "/%1F%1f\x1f", "/%251F"])
def test_a_path_is_never_an_invalid_key(path: str) -> None:
    """The character that separates the parts of a key may appear in a path, encoded."""
    limiter = Limiter.from_rules(
        """
        version: 1
        rules: [{id: all, by: [ip, endpoint, method], limits: ["5/minute"]}]
        """
    )
    web_request = Identity().request_of(request_with(path=path, method="A\x1fB"))
    assert limiter.check(web_request).remaining == 4


# ------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("x" * 256, "x" * 256),
        ("x" * 257, digest_of("x" * 257)),
        ("a\x1fb", digest_of("a\x1fb")),
        ("a\x00b", digest_of("a\x00b")),
        ("caf\xe9", "caf\xe9"),
        ("#abc", digest_of("#abc")),
    ],
)
def test_values_that_no_key_may_hold_are_digested(value: str, found: str) -> None:
    """Values that look like a digest are digested, too."""
    assert Identity().key_of(request_with({"X-Key": value}), "header:X-Key")[1] == found


def test_a_client_cannot_send_the_digest_of_another() -> None:
    """A digest sent as a value is digested again."""
    identity = Identity()
    victim = identity.key_of(request_with({"X-Key": "v" * 300}), "header:X-Key")
    attacker = identity.key_of(request_with({"X-Key": victim[1]}), "header:X-Key")
    assert victim != attacker


TEXTS = st.text(alphabet=st.characters(max_codepoint=255), max_size=300)


@given(TEXTS, TEXTS)
def test_different_values_are_different_keys(one: str, other: str) -> None:
    """Surrounding white space is ignored."""
    keys = [Identity().key_of(request_with({"X-Key": v}), "header:X-Key") for v in (one, other)]
    assert (keys[0] == keys[1]) == (one.strip() == other.strip())


@given(TEXTS, TEXTS, TEXTS, st.binary(max_size=100), ANYTHING)
def test_any_input_can_be_counted(
    header: str, authorization: str, query: str, path: bytes, session: Any
) -> None:
    """Every source gives a key that a limiter accepts."""
    web_request = request_with(
        {"X": header, "Authorization": f"Bearer {authorization}", "Cookie": f"c={header}"},
        query=f"q={query}",
        raw_path=path,
        session={"s": session},
    )
    sources = ["header:X", "bearer", "header:Authorization", "query:q", "cookie:c", "session:s"]
    identity = Identity({f"f{place}": source for place, source in enumerate(sources)})
    for source in (*sources, "unverified_claim:sub"):
        assert len(subject_of(identity.key_of(web_request, source))) <= 512
    web_request = identity.request_of(web_request)
    assert isinstance(web_request.endpoint, str)
    for name in ("ip", "method", *web_request.attributes):
        assert Limiter("5/minute", by=["ip", name] if name != "ip" else ["ip"]).check(web_request)


# ------------------------------------------------------------------------------------ refused


async def later(web_request: WebRequest) -> str | None:
    """A source that must be awaited."""
    return None


class Later:
    """An object that must be awaited when it is called."""

    async def __call__(self, web_request: WebRequest) -> str | None:
        return None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("header", "header:NAME, bearer"),
        ("header:", "invalid name"),
        ("header:X Y", "invalid name"),
        ("Header:X", "header:NAME, bearer"),
        ("cookie:", "invalid name"),
        ("query:" + "x" * 129, "invalid name"),
        ("unverified_claim:", "invalid name"),
        ("ip", "header:NAME, bearer"),
        ("bearer:x", "header:NAME, bearer"),
        ("", "header:NAME, bearer"),
        (7, "header:NAME, bearer"),
        (None, "header:NAME, bearer"),
        (later, "is async"),
        (Later(), "is async"),
        ([], "1 to 16"),
        (["address"] * 17, "1 to 16"),
    ],
)
def test_an_unknown_source_is_rejected(source: Any, said: str) -> None:
    """The error comes at the start and lists the known sources."""
    with pytest.raises(ConfigError, match=said):
        Identity({"user": source})
    with pytest.raises(ConfigError, match=said):
        Identity().compiled(source)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ip": "header:X"}, "trusted_proxies"),
        ({"endpoint": "header:X"}, "route or the path"),
        ({"method": "header:X"}, "request's method"),
        ({"apikey": "bearer"}, "'apikey' must be spelled api_key"),
        ({"User": "bearer"}, "'User' must be spelled user"),
        ({"a b": "bearer"}, "not the name"),
        ({7: "bearer"}, "not the name"),
        ([("user", "bearer")], "not a mapping"),
        ({f"f{number}": "bearer" for number in range(65)}, "at most 64"),
    ],
)
def test_fields_that_cannot_be_set_are_rejected(fields: Any, said: str) -> None:
    """The error gives the reason."""
    with pytest.raises(ConfigError, match=said):
        Identity(fields)


@pytest.mark.parametrize("value", [True, 1.5, b"x", ["x"], object()])
def test_a_function_that_returns_no_text_is_the_applications_error(value: Any) -> None:
    """The client cannot fix it, so it is not a 400."""
    with pytest.raises(TypeError, match="returns text or None"):
        Identity().key_of(request_with(), lambda web_request: value)


@given(ANYTHING, ANYTHING, ANYTHING)
def test_any_settings_give_an_identity_or_an_error(fields: Any, proxies: Any, prefix: Any) -> None:
    """The error is a ConfigError."""
    for make in (
        partial(Identity, fields),
        partial(Identity, {"user": fields}),
        partial(Identity, trusted_proxies=proxies),
        partial(Identity, ipv6_prefix=prefix),
        partial(Identity, forwarded=prefix),
        partial(Identity().compiled, proxies),
    ):
        with suppress(ConfigError):
            make()


# ------------------------------------------------------------------------------------ remembered


def _keys(
    identity: Identity | None = None, key: Any = None, per_route: bool = False
) -> RequestKeys:
    return RequestKeys(identity or Identity(), key, per_route=per_route, has_rules=False)


def _request(query: str = "", peer: str = "192.0.2.1", **headers: str) -> AsgiRequest:
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return AsgiRequest(scope_of(headers=pairs, peer=peer, query_string=query.encode()))


@pytest.mark.parametrize(
    ("options", "web_request", "key"),
    [
        ({}, _request(), "address:192.0.2.1"),
        ({"key": "header:X-Key"}, _request(x_key="a"), "header:x-key:a"),
        ({"key": "header:X-Key"}, _request(), "anonymous:*"),
        ({"key": ["header:X-Key", "address"]}, _request(), "address:192.0.2.1"),
        ({"key": ["query:a", "query:a:b"]}, _request("a=1"), ("query:a", "1")),
        ({"key": lambda web_request: None}, _request(), ("address", "192.0.2.1")),
        ({"per_route": True}, _request(), ("address", "192.0.2.1", "/")),
    ],
)
def test_a_key_is_text_unless_keys_could_collide(
    options: dict[str, Any], web_request: AsgiRequest, key: object
) -> None:
    """It is a tuple if another source or the application could produce the same text."""
    made = _keys(**options)
    assert (
        made.of(web_request)
        if made.hook is None
        else made.of_hook(made.hook(web_request), web_request)
    ) == key


@given(
    st.lists(st.sampled_from(["query:a", "query:a:b", "query:a:b:c", "header:x"]), min_size=1),
    st.dictionaries(st.sampled_from(["a", "a:b", "a:b:c"]), st.sampled_from(["b:c", "c", "1"])),
    st.dictionaries(st.sampled_from(["a", "a:b", "a:b:c"]), st.sampled_from(["b:c", "c", "1"])),
)
def test_different_clients_have_different_keys(
    sources: list[str], one: dict[str, str], two: dict[str, str]
) -> None:
    """Two requests share a subject only if the same source found the same value."""
    made = _keys(key=sources[:16])

    def found(fields: dict[str, str]) -> tuple[str, str] | None:
        for source in sources[:16]:
            kind, _, name = source.partition(":")
            if kind == "query" and name in fields:
                return source, fields[name]
        return None

    requests = [
        _request("&".join(f"{name}={value}" for name, value in each.items())) for each in (one, two)
    ]
    subjects = [subject_of(key) for key in map(made.of, requests) if not isinstance(key, Request)]
    assert (subjects[0] == subjects[1]) == (found(one) == found(two))


def test_a_key_function_cannot_imitate_an_address() -> None:
    """A client that sends the text of an address key is not counted as that address."""
    made = _keys(key=lambda web_request: web_request.header("x-user"))
    spoofed, own = made.of_hook("address:192.0.2.1", _request()), made.of_hook(None, _request())
    assert not isinstance(spoofed, Request)
    assert not isinstance(own, Request)
    assert subject_of(spoofed) != subject_of(own)


def test_the_cache_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is the same before and after it is dropped."""
    monkeypatch.setattr(identities, "PEERS_MAX", 4)
    made = _keys()
    for number in range(20):
        web_request = _request(peer=f"192.0.2.{number}")
        assert made.of(web_request) == made.of(web_request) == f"address:192.0.2.{number}"
        assert made.by_peer is not None
        assert len(made.by_peer) <= 4


def test_a_peer_that_may_be_a_proxy_is_not_cached_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A peer may send requests of its own first; the warning is logged when it forwards one."""
    made = _keys()
    requests = [_request(peer="10.0.0.9"), _request(peer="10.0.0.9", x_forwarded_for="192.0.2.1")]
    assert [made.of(web_request) for web_request in (*requests, *requests)] == [
        "address:10.0.0.9"
    ] * 4
    assert len(caplog.messages) == 1
    assert made.by_peer == {"10.0.0.9": "address:10.0.0.9"}


@pytest.mark.parametrize(
    "options",
    [
        {"identity": Identity(trusted_proxies=["loopback"])},
        {"identity": Identity(trusted_proxies=["unix"])},
        {"per_route": True},
        {"key": ["header:X-Key", "address"]},
        {"key": lambda web_request: None},
    ],
)
def test_keys_are_cached_only_if_they_depend_on_the_peer_alone(options: dict[str, Any]) -> None:
    """Behind a proxy, one peer stands for many clients."""
    assert _keys(**options).by_peer is None


PARTS = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(
    ["", " ", "#empty", "a\x1fb", "x" * 300, "y" * 600, digest_of("y" * 600), "*", "\ud800"]
)
HOOK_KEYS = PARTS | st.lists(PARTS, min_size=1, max_size=4).map(tuple)
LONG_PARTS = ("x" * 300, "y" * 300)


@given(HOOK_KEYS, HOOK_KEYS, st.booleans())
@example(LONG_PARTS, "\x1f".join(LONG_PARTS), False)
@example((*LONG_PARTS, "z"), (LONG_PARTS[0], "\x1f".join((LONG_PARTS[1], "z"))), False)
@example(LONG_PARTS, digest_of(*LONG_PARTS), False)
def test_keys_of_a_key_function_are_valid_and_never_collide(
    one: Any, two: Any, per_route: bool
) -> None:
    """Whatever a client has put into them. Blank parts count as one."""

    def parts(key: Any) -> list[str]:
        return [
            part if part.strip() else "" for part in (key if isinstance(key, tuple) else (key,))
        ]

    keys = _keys(key=lambda web_request: None, per_route=per_route)
    subjects = []
    for key in (one, two):
        found = keys.of_hook(key, _request())
        assert not isinstance(found, Request)
        subjects.append(subject_of(found))
    assert (subjects[0] == subjects[1]) is (parts(one) == parts(two))


@pytest.mark.parametrize("victim", ["v" * 300, "a\x1fb"])
@pytest.mark.parametrize(("long", "forged"), [("user", "tenant"), ("tenant", "user")])
def test_a_key_function_may_return_the_digest_of_another_field(
    victim: str, long: str, forged: str
) -> None:
    """A client that sends a long user and its digest as tenant does not count as that tenant."""
    keys = _keys(key=lambda web_request: None)

    def counted(**fields: str) -> str | None:
        found = keys.of_hook(Request(**fields), _request())
        assert isinstance(found, Request)
        return str(getattr(found, forged))

    sent = {long: victim, forged: digest_of(victim)}
    assert counted(**sent) != counted(**{forged: victim}) == digest_of(victim)
