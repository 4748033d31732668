"""Who is asking: sources, their priority, and that nothing a client sends is an error."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from functools import partial
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_fuzz_entries import ANYTHING
from tollkeeper import ConfigError, Limiter, Request
from tollkeeper.core.subjects import subject_of
from tollkeeper.web import identity as identities
from tollkeeper.web.calls import AsgiCall, Call, WsgiCall, digest_of
from tollkeeper.web.claims import Claim
from tollkeeper.web.identity import NOBODY, Identity

PEER = "203.0.113.9"


def call_of(
    headers: dict[str, str] | None = None, query: str = "", path: str = "/", **more: Any
) -> AsgiCall:
    """A call with these headers and this query."""
    raw = [(name.lower().encode(), v.encode("latin-1")) for name, v in (headers or {}).items()]
    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "headers": raw,
        "client": (PEER, 1),
    }
    return AsgiCall(scope | more)


def unsigned(claims: dict[str, Any]) -> str:
    """A token as one looks behind a gateway."""
    return f"x.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()}.x"


# ------------------------------------------------------------------------------------ sources


@pytest.mark.parametrize(
    ("source", "call", "key"),
    [
        (
            "header:X-API-Key",
            call_of({"X-API-Key": " sk_1 "}),
            ("header:x-api-key", "sk_1"),
        ),
        ("bearer", call_of({"Authorization": "Bearer t"}), ("bearer", digest_of("t"))),
        (
            "header:Authorization",
            call_of({"Authorization": "Basic t"}),
            ("header:authorization", digest_of("Basic t")),
        ),
        ("header:cookie", call_of({"Cookie": "a=1"}), ("header:cookie", digest_of("a=1"))),
        ("query:key", call_of(query="key=sk%5F1"), ("query:key", "sk_1")),
        ("cookie:sid", call_of({"Cookie": "sid=7"}), ("cookie:sid", digest_of("7"))),
        ("session:user_id", call_of(session={"user_id": 42}), ("session:user_id", "42")),
        (
            "claim:sub",
            call_of({"Authorization": f"Bearer {unsigned({'sub': '42'})}"}),
            ("claim:sub", "42"),
        ),
        ("address", call_of(), ("address", PEER)),
        (lambda call: call.method, call_of(), ("custom:1", "POST")),
        (lambda call: 42, call_of(), ("custom:1", "42")),
    ],
)
def test_each_source_is_a_key(source: Any, call: Call, key: tuple[str, str]) -> None:
    """Where it was found is part of the key; secrets are never the key themselves."""
    assert Identity().key_of(call, [source]) == key
    assert Identity().key_of(call, source) == key


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("header:X-API-Key", call_of({"X-API-Key": " "})),
        ("bearer", call_of({"Authorization": "Basic t"})),
        ("header:Authorization", call_of({"Authorization": " "})),
        ("query:key", call_of(query="key=%20")),
        ("cookie:sid", call_of({"Cookie": "sid="})),
        ("session:user_id", call_of(session={"user_id": True})),
        ("session:user_id", call_of(session={"user_id": object()})),
        ("session:user_id", call_of(session={})),
        ("claim:sub", call_of({"Authorization": "Bearer x"})),
        ("address", call_of(client=None)),
        (lambda call: None, call_of()),
        (lambda call: "  ", call_of()),
    ],
)
def test_what_is_empty_is_absent(source: Any, call: Call) -> None:
    """The next source is asked; in the end all who show nothing are one."""
    assert Identity().key_of(call, [source]) == NOBODY
    assert Identity().key_of(call, [source, lambda call: "x"]) == ("custom:2", "x")
    assert subject_of(NOBODY)


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        ("header:X-API-Key", b"x-api-key", "{}"),
        ("header:Authorization", b"authorization", "Basic {}"),
        ("bearer", b"authorization", "Bearer {}"),
        ("claim:sub", b"authorization", "Bearer {}"),
        (Claim("sub", trusted_gateway=True, header="X-Token"), b"x-token", "{}"),
        ("query:key", None, "key={}"),
        ("cookie:sid", b"cookie", "sid={}"),
    ],
)
def test_a_value_that_comes_twice_is_no_new_client(
    source: Any, name: bytes | None, value: str
) -> None:
    """A framework takes the first or the last: who adds another shares one count, or has none."""

    def key_of(*values: str) -> tuple[str, str]:
        texts = [value.format(each).encode() for each in values]
        headers = [] if name is None else [(name, each) for each in texts]
        query = b"&".join(texts) if name is None else b""
        scope = {"type": "http", "headers": headers, "query_string": query, "client": (PEER, 1)}
        return Identity().key_of(AsgiCall(scope), [source, "address"])

    own, *made_up = [unsigned({"sub": each}) for each in ("own", "a", "b", "c")]
    found = {key_of(own, each) for each in made_up} | {key_of(each, own) for each in made_up}
    assert len(found) == 1
    assert found.isdisjoint({key_of(own), key_of(made_up[0])})
    assert key_of(own, own) == key_of(own)


def test_no_source_finds_anything_in_an_empty_call() -> None:
    """Nor do they mind."""
    sources = ["header:x", "bearer", "claim:x", "query:x", "cookie:x", "session:x", "address"]
    assert Identity().key_of(AsgiCall({"type": "http"}), sources) == NOBODY
    assert Identity().key_of(WsgiCall({}), tuple(sources)) == NOBODY


def test_the_first_that_finds_something_is_taken() -> None:
    """In the order in which they are written."""
    sources = ["header:X-API-Key", "session:user", "address"]
    both = call_of({"X-API-Key": "sk_1"}, session={"user": "u"})
    identity = Identity()
    assert identity.key_of(both, sources) == ("header:x-api-key", "sk_1")
    assert identity.key_of(both, sources[1:]) == ("session:user", "u")
    assert identity.key_of(call_of(), sources) == ("address", PEER)


def test_a_session_that_is_not_there_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """All would count as one, which the operator should not have to find out. An empty one is."""
    identity = Identity({"user": "session:of_this_test"})
    assert identity.request_of(call_of(session={})).user is None
    assert caplog.messages == []
    for _ in range(2):
        assert identity.request_of(call_of()).user is None
    assert [message.partition(" is looked")[0] for message in caplog.messages] == [
        "session:of_this_test"
    ]


def test_the_same_value_from_two_sources_is_two_keys() -> None:
    """A header cannot name somebody else's query field."""
    call = call_of({"X-Key": "7"}, query="key=7")
    identity = Identity()
    assert identity.key_of(call, "header:X-Key") != identity.key_of(call, "query:key")
    first, second = (lambda call: None), (lambda call: "7")
    assert identity.key_of(call, [first, second]) == ("custom:2", "7")


def test_a_verified_claim_is_a_source() -> None:
    """A bad token is as good as none, and the next source is asked."""
    claim = Claim("sub", key="s" * 32, algorithms=["HS256"])
    identity = Identity({"user": [claim, "header:X-User"]})
    good = jwt.encode({"sub": "42"}, "s" * 32, algorithm="HS256")
    forged = jwt.encode({"sub": "42"}, "f" * 32, algorithm="HS256")
    said = {"X-User": "guest"}
    assert identity.request_of(call_of({"Authorization": f"Bearer {good}"} | said)).user == "42"
    assert (
        identity.request_of(call_of({"Authorization": f"Bearer {forged}"} | said)).user == "guest"
    )
    assert claim.rejected == 1
    assert identity.key_of(call_of({"Authorization": f"Bearer {good}"}), claim)[0] == "claim:sub"


# ------------------------------------------------------------------------------------ requests


def test_a_request_for_rules() -> None:
    """Fields by name, other names as attributes, and what is always the call's own."""
    identity = Identity(
        {
            "user": "session:user",
            "api_key": ("header:X-API-Key", "query:key"),
            "tenant": "header:X-Tenant",
            "tier": lambda call: "pro",
            "region": "header:X-Region",
            "device": "cookie:device",
        }
    )
    call = call_of(
        {"X-Region": "eu", "X-Tenant": "t1"},
        query="key=sk_1",
        path="/v1/orders",
        session={"user": 7},
    )
    assert identity.request_of(call) == Request(
        user="7",
        api_key="sk_1",
        ip=PEER,
        tenant="t1",
        tier="pro",
        endpoint="/v1/orders",
        method="POST",
        attributes={"region": "eu"},
    )


def test_without_fields_a_request_is_what_the_call_is() -> None:
    """Address, path and method need no setting."""
    assert Identity().request_of(call_of(path="/a")) == Request(
        ip=PEER, endpoint="/a", method="POST"
    )


def test_a_route_goes_before_the_path() -> None:
    """Once the framework knows it, /users/1 and /users/2 are one endpoint."""
    call = WsgiCall({"PATH_INFO": "/users/1"}, route="/users/<id>")
    assert Identity().request_of(call).endpoint == "/users/<id>"


def test_addresses_behind_proxies() -> None:
    """The settings of addresses are handed on."""
    call = call_of({"X-Forwarded-For": "2001:db8:1:2:3::4", "Forwarded": "for=1.2.3.4"})
    trusting = Identity(trusted_proxies=[PEER], ipv6_prefix=48, forwarded="x-forwarded-for")
    assert trusting.request_of(call).ip == trusting.address_of(call) == "2001:db8:1::"
    assert Identity().address_of(call) == PEER


@pytest.mark.parametrize("path", ["/a%1Fb", "/a%1fb", "/a\x1fb", "/%1F%1f\x1f", "/%251F"])
def test_a_path_is_never_an_invalid_key(path: str) -> None:
    """The character that keeps the parts of a key apart may stand in a path, encoded."""
    limiter = Limiter.from_rules(
        """
        version: 1
        rules: [{id: all, by: [ip, endpoint, method], limits: ["5/minute"]}]
        """
    )
    request = Identity().request_of(call_of(path=path, method="A\x1fB"))
    assert limiter.check(request).remaining == 4


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
def test_values_that_no_key_may_hold(value: str, found: str) -> None:
    """They are counted as their digest; so is what looks like one."""
    assert Identity().key_of(call_of({"X-Key": value}), "header:X-Key")[1] == found


def test_nobody_can_send_a_digest() -> None:
    """Whoever sends somebody's digest as a value is not taken for him."""
    identity = Identity()
    victim = identity.key_of(call_of({"X-Key": "v" * 300}), "header:X-Key")
    attacker = identity.key_of(call_of({"X-Key": victim[1]}), "header:X-Key")
    assert victim != attacker


TEXTS = st.text(alphabet=st.characters(max_codepoint=255), max_size=300)


@given(TEXTS, TEXTS)
def test_different_values_are_different_keys(one: str, other: str) -> None:
    """But for the space around them."""
    keys = [Identity().key_of(call_of({"X-Key": v}), "header:X-Key") for v in (one, other)]
    assert (keys[0] == keys[1]) == (one.strip() == other.strip())


@given(TEXTS, TEXTS, TEXTS, st.binary(max_size=100), ANYTHING)
def test_anything_that_is_sent_can_be_counted(
    header: str, authorization: str, query: str, path: bytes, session: Any
) -> None:
    """Whatever a client sends, every source gives a key that a limiter takes."""
    call = call_of(
        {"X": header, "Authorization": f"Bearer {authorization}", "Cookie": f"c={header}"},
        query=f"q={query}",
        raw_path=path,
        session={"s": session},
    )
    sources = ["header:X", "bearer", "header:Authorization", "query:q", "cookie:c", "session:s"]
    identity = Identity({f"f{place}": source for place, source in enumerate(sources)})
    for source in (*sources, "claim:sub"):
        assert len(subject_of(identity.key_of(call, source))) <= 512
    request = identity.request_of(call)
    assert isinstance(request.endpoint, str)
    for name in ("ip", "method", *request.attributes):
        assert Limiter("5/minute", by=["ip", name] if name != "ip" else ["ip"]).check(request)


# ------------------------------------------------------------------------------------ refused


async def later(call: Call) -> str | None:
    """A source that cannot be asked without waiting."""
    return None


class Later:
    """The same as an object."""

    async def __call__(self, call: Call) -> str | None:
        return None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("header", "header:NAME, bearer"),
        ("header:", "no name"),
        ("header:X Y", "no name"),
        ("Header:X", "header:NAME, bearer"),
        ("cookie:", "no name"),
        ("query:" + "x" * 129, "no name"),
        ("claim:", "no name"),
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
def test_a_source_that_is_not_known_is_refused(source: Any, said: str) -> None:
    """At the start, with those that there are."""
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
        ({"a b": "bearer"}, "not the name"),
        ({7: "bearer"}, "not the name"),
        ([("user", "bearer")], "not a mapping"),
        ({f"f{number}": "bearer" for number in range(65)}, "at most 64"),
    ],
)
def test_fields_that_cannot_be_set_are_refused(fields: Any, said: str) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match=said):
        Identity(fields)


@pytest.mark.parametrize("value", [True, 1.5, b"x", ["x"], object()])
def test_a_function_that_returns_no_text_is_the_applications_error(value: Any) -> None:
    """It is nothing that the client could mend, so it is not a 400."""
    with pytest.raises(TypeError, match="returns text or None"):
        Identity().key_of(call_of(), lambda call: value)


@given(ANYTHING, ANYTHING, ANYTHING)
def test_any_settings(fields: Any, proxies: Any, prefix: Any) -> None:
    """An Identity or a ConfigError."""
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


def test_sources_are_compiled_once_and_few_are_kept() -> None:
    """Also where functions are made anew for every request, or cannot be remembered at all."""
    identity = Identity()
    sources = ["bearer", "address"]
    assert identity.compiled(sources) is identity.compiled(tuple(sources))
    for _ in range(identities.COMPILED_MAX + 10):
        identity.key_of(call_of(), lambda call: "x")
    assert len(identity._compiled) <= identities.COMPILED_MAX

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]  # what the test is about

        def __call__(self, call: Call) -> str:
            return "x"

    assert identity.key_of(call_of(), Unhashable()) == ("custom:1", "x")
    assert identity.key_of(call_of(), [Unhashable()]) == ("custom:1", "x")
