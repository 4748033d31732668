"""Types and JSON of bodies, which the check API and the admin API read alike."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.http import bodies
from ratekeeper.service.http.bodies import BodyRejected, body_reader, reject_doubles, strict_json
from ratekeeper.service.http.checks import CheckBody
from ratekeeper.service.http.tokens import create_token
from tests.service.http.client import HttpClient, http_service

# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "line 1, column 1"),
        (b"{", "line 1, column 2"),
        (b'{"a": 1,\n "b": }', "line 2, column 7"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"x": {"a": 1, "a": 2}}', "'a' is given twice"),
        (b"NaN", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b'"\xff"', "not UTF-8 at byte 2"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"1" * 5_000, "not JSON"),
    ],
)
def test_ambiguous_json_is_rejected(raw: bytes, words: str) -> None:
    """The 400 has the reason, and the place if it is known."""
    with pytest.raises(BodyRejected) as error:
        strict_json(raw)
    assert error.value.status == 400
    assert words in error.value.detail


@given(st.binary(max_size=200))
def test_any_bytes_are_json_or_rejected(raw: bytes) -> None:
    """No other error is raised."""
    with suppress(BodyRejected):
        strict_json(raw)


# ── Names given twice ──────────────────────────────────────────────────────────────────────────

TEXTS = st.text(max_size=5) | st.sampled_from([":", "a:b", '"', "\\", "\u003a", "user", "cost"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(TEXTS, inner), max_size=3),
    max_leaves=8,
)


def written(value: Any, *, ascii_only: bool, spaced: bool) -> str:
    """Return JSON in which an object is a list of pairs, so that it can have a name twice."""
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):
        colon = " : " if spaced else ":"
        pairs = (
            json.dumps(name, ensure_ascii=ascii_only)
            + colon
            + written(each, ascii_only=ascii_only, spaced=spaced)
            for name, each in value
        )
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(e, ascii_only=ascii_only, spaced=spaced) for e in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def has_double(value: Any) -> bool:
    """Return True if an object has a name twice."""
    if not isinstance(value, list):
        return False
    names = [each[0] for each in value if isinstance(each, tuple)]
    inner = [each[1] if isinstance(each, tuple) else each for each in value]
    return len(set(names)) < len(names) or any(map(has_double, inner))


@given(st.lists(st.tuples(TEXTS, VALUES), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_name_given_twice_is_found(pairs: Any, ascii_only: bool, spaced: bool) -> None:
    """In any object, with any colons in its texts, with escapes and without."""
    raw = written(pairs, ascii_only=ascii_only, spaced=spaced).encode()
    if has_double(pairs):
        with pytest.raises(BodyRejected, match="given twice"):
            reject_doubles(raw)
    else:
        reject_doubles(raw)


FIELDS = st.one_of(
    st.tuples(st.sampled_from(["user", "ip", "endpoint"]), TEXTS | st.none()),
    st.tuples(st.just("cost"), st.integers(0, 2)),
    st.tuples(st.just("attributes"), st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)),
)
read_check = body_reader(CheckBody)


@given(st.lists(FIELDS, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_check_with_a_name_given_twice_is_rejected(
    pairs: Any, ascii_only: bool, spaced: bool
) -> None:
    """Whatever the fields are: defaults, null, texts with colons or escapes, attributes."""
    raw = written(pairs, ascii_only=ascii_only, spaced=spaced).encode()
    if has_double(pairs):
        with pytest.raises(BodyRejected, match="given twice"):
            read_check(raw)
    else:
        with suppress(ConfigError):  # a NUL
            read_check(raw)


def test_a_usual_check_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are counted by encoding it, which takes half as long as to decode it again."""
    monkeypatch.setattr(bodies, "reject_doubles", None)
    read_check(b'{"api_key":"sk_1","endpoint":"/v1/orders","method":"POST","cost":2}')
    read_check(b'{"ip": "2001:db8::7", "attributes": {"region": "eu", "tenant:id": "a:b"}}')


def test_a_usual_body_is_not_parsed_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with attributes nor with an address that has colons: it would take 5 µs."""
    monkeypatch.setattr(bodies, "strict_json", None)
    reject_doubles(b'{"api_key":"sk_1","endpoint":"/v1/orders","method":"POST","cost":1}')
    reject_doubles(b'{"ip":"2001:db8::7","attributes":{"region":"eu","tenant:id":"a:b"}}')
    reject_doubles(b'{"checks":[{"user":"1"},{"user":"2","cost":3}],"atomic":true}')


DOUBLES = {
    "/v1/check": b'{"user": "1", "cost": 0, "user": "2"}',
    "/v1/check/batch": b'{"checks": [{"user": "1", "user": "2"}]}',
    "/v1/settle": b'{"user": "1", "reserved": 1, "actual": 1, "user": "2"}',
    "/v1/quota/grant": b'{"user": "1", "units": 1, "units": 5}',
}


@pytest.mark.parametrize("path", DOUBLES)
async def test_every_endpoint_rejects_a_name_given_twice(path: str, tmp_path: Path) -> None:
    """Each time: a body is not remembered if it was rejected."""
    secret = create_token(tmp_path / "tokens.json", "t", "admin")
    async with http_service(tmp_path / "tokens.json") as http:
        for _ in range(2):
            sent = {"Authorization": f"Bearer {secret}"}
            answer = await http("POST", path, DOUBLES[path], sent)
            assert answer.status == 400
            assert answer.data["error"]["code"] == "INVALID_JSON"
            assert "is given twice in one object" in answer.data["detail"]


# ── The same answers ───────────────────────────────────────────────────────────────────────────

ALIKE: list[tuple[str | None, bytes]] = [
    (None, b"{}"),
    ("application/json", b"{}"),
    ("application/json; charset=utf-8", b"{}"),
    ("application/merge-patch+json", b"{}"),
    ("application/x-www-form-urlencoded", b"{}"),
    ("text/plain", b"{}"),
    ("multipart/form-data; boundary=x", b"{}"),
    ("application/yaml", b"{}"),
    ("application/json", b""),
    ("application/json", b"{"),
    ("application/json", b'{"user": "1", "user": "2"}'),
    ("application/json", b'{"user": "\xff"}'),
    ("application/json", b'{"user": "\\ud800"}'),
    ("application/json", b'{"usr": "1"}'),
    ("application/json", b'{"user": 1}'),
    ("application/json", b'{"cost": "1"}'),
    ("application/json", b'{"user": "' + b"x" * 600 + b'"}'),
    ("application/json", b" " * 6_000_000),
]
# What these two say beyond the place differs: each library has its own words.
_OWN_WORDS = ("user", "cost")


@pytest.mark.parametrize(("kind", "body"), ALIKE)
async def test_the_check_api_and_the_admin_api_answer_alike(
    kind: str | None, body: bytes, tmp_path: Path
) -> None:
    """The same status, code, type and text for the same body."""
    secret = create_token(tmp_path / "tokens.json", "t", "admin")
    sent = {"Authorization": f"Bearer {secret}"}
    if kind is not None:
        sent["Content-Type"] = kind
    async with http_service(tmp_path / "tokens.json") as http:
        checked = await http("POST", "/v1/check", body, sent)
        explained = await http("POST", "/v1/admin/explain", body, sent)
        await http.app._admin.state.control.close()
    assert checked.status == explained.status
    if checked.status == 200:
        return
    assert checked.headers["content-type"] == explained.headers["content-type"]
    assert checked.data["error"]["code"] == explained.data["error"]["code"]
    said = [answer.data["detail"] for answer in (checked, explained)]
    if any(f"`$.{name}`" in said[0] for name in _OWN_WORDS):
        said = [text.partition(":")[0] + text[text.rindex(" - at ") :] for text in said]
    elif checked.status == 413:
        said = [text.replace("65,536", "5,242,880") for text in said]
    assert said[0] == said[1]


@pytest.mark.parametrize(("method", "path"), [("GET", "/check"), ("GET", "/x"), ("BREW", "/rules")])
async def test_unknown_paths_and_methods_get_the_same_text(method: str, path: str) -> None:
    """Under both prefixes."""

    async def detail(http: HttpClient, url: str) -> tuple[int, str]:
        answer = await http(method, url)
        return answer.status, answer.data["detail"]

    async with http_service() as http:
        status, said = await detail(http, f"/v1/admin{path}")
        if status == 404:
            assert said == f"there is no '/v1/admin{path}'; /docs lists every endpoint"
            assert await detail(http, "/v1/x") == (
                404,
                "there is no '/v1/x'; /docs lists every endpoint",
            )
        else:
            assert said == "the method 'BREW' is not allowed here; use GET, PUT"
            assert (await detail(http, "/v1/check"))[1] == (
                "the method 'BREW' is not allowed here; use POST"
            )
