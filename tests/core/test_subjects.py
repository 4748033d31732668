"""Keys and requests become subjects that never collide."""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError, InvalidKey
from ratekeeper.core.model import Request
from ratekeeper.core.subjects import (
    KEY_LENGTH_MAX,
    PARTS_MAX,
    SEPARATOR,
    check_by,
    subject_of,
    subject_of_request,
)


class Plan(StrEnum):
    FREE = "free"


class Pair(NamedTuple):
    tenant: str
    user: str


@pytest.mark.parametrize(
    ("key", "subject"),
    [
        ("user:42", "user:42"),
        ("a", "a"),
        ("x" * 512, "x" * 512),
        ("naïve/日本/🙂", "naïve/日本/🙂"),
        (" ", " "),
        ("\x00\n", "\x00\n"),
        (Plan.FREE, "free"),
        (("a", "b"), "a\x1fb"),
        (("a/b", "c"), "a/b\x1fc"),
        (Pair("t", "u"), "t\x1fu"),
        ((Plan.FREE, "x"), "free\x1fx"),
        (("x",) * 16, "\x1f".join("x" * 16)),
        (("x" * 255, "y" * 256), "x" * 255 + "\x1f" + "y" * 256),
    ],
)
def test_valid_keys(key: Any, subject: str) -> None:
    """Each key names this subject, as a plain str."""
    assert subject_of(key) == subject
    assert type(subject_of(key)) is str


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "is empty"),
        ("x" * 513, "has 513 characters"),
        ("a\x1fb", "U+001F"),
        ("\ud800", "half of a surrogate pair"),
        (("a", ""), "is empty"),
        (("a", "b\x1fc"), "U+001F"),
        (("a", "\udfff"), "half of a surrogate pair"),
        (("a", 42), "42 is int; convert it to text"),
        (("a", None), "None is NoneType"),
        (("a", ("b",)), "is tuple"),
        (("x" * 256, "y" * 256), "at most 512 characters, but this one has 513"),
        ((), "tuple of 1 to 16 texts, not tuple"),
        (("x",) * 17, "tuple of 1 to 16 texts"),
        (None, "not NoneType"),
        (42, "not int"),
        (b"user:42", "not bytes"),
        (["a", "b"], "not list"),
        ({"a": "b"}, "not dict"),
        (object(), "not object"),
    ],
    ids=range(19),
)
def test_invalid_keys(key: Any, problem: str) -> None:
    """Each raises an InvalidKey whose message can be printed anywhere."""
    with pytest.raises(InvalidKey) as caught:
        subject_of(key)
    assert problem in str(caught.value)
    str(caught.value).encode()


_PART = st.text(
    st.characters(exclude_characters=SEPARATOR, exclude_categories=["Cs"]), min_size=1, max_size=20
)


@given(st.lists(_PART, min_size=2, max_size=4), st.lists(_PART, min_size=2, max_size=4))
def test_different_parts_make_different_subjects(one: list[str], other: list[str]) -> None:
    """Two compound keys share a subject only if they are equal."""
    same = subject_of(tuple(one)) == subject_of(tuple(other))
    assert same == (one == other)


@given(st.lists(_PART, min_size=2, max_size=4), _PART)
def test_no_plain_text_is_a_compound_key(parts: list[str], text: str) -> None:
    """A client that chooses a plain key cannot reach a compound one."""
    assert subject_of(tuple(parts)) != subject_of(text)
    for glue in (":", "/", "", " ", "\x1e"):
        assert subject_of(tuple(parts)) != subject_of(glue.join(parts))


def test_a_tuple_of_one_is_its_part() -> None:
    """("a",) and "a" are the same key."""
    assert subject_of(("a",)) == subject_of("a")


@pytest.mark.parametrize(
    ("request_", "by", "subject"),
    [
        (Request(user="42"), ["user"], "user:42"),
        (Request(tenant="42"), ["tenant"], "tenant:42"),
        (Request(tenant="t1", user="42"), ["tenant", "user"], "tenant:t1\x1fuser:42"),
        (Request(tenant="t1", user="42"), ["user", "tenant"], "user:42\x1ftenant:t1"),
        (Request(), ["user"], "user"),
        (Request(user=""), ["user"], "user:"),
        (Request(ip="::1", user="x"), ["ip"], "ip:::1"),
        (Request(attributes={"region": "eu"}), ["region"], "region:eu"),
        (Request(attributes={}), ["region"], "region"),
        # A field of the request is not read from its attributes: a client may choose those.
        (Request(attributes={"user": "root"}), ["user"], "user"),
        (
            Request("u", "k", "i", "t", "r", "e", "m"),
            ["user", "api_key", "ip", "tenant", "tier", "endpoint", "method"],
            "user:u\x1fapi_key:k\x1fip:i\x1ftenant:t\x1ftier:r\x1fendpoint:e\x1fmethod:m",
        ),
    ],
)
def test_subjects_of_requests(request_: Request, by: list[str], subject: str) -> None:
    """The subject has the attributes with their names, in the order of `by`."""
    assert subject_of_request(request_, by) == subject


@pytest.mark.parametrize("value", ["x" * 600, "a\x1fuser:root", "\ud800"])
def test_a_value_cannot_change_another_part(value: str) -> None:
    """A value that is too long, contains the separator or is not text is rejected."""
    with pytest.raises(InvalidKey):
        subject_of_request(Request(tenant=value, user="me"), ["tenant", "user"])


@given(st.none() | _PART, st.none() | _PART, st.none() | _PART, st.none() | _PART)
def test_different_requests_have_different_subjects(
    tenant: str | None, user: str | None, tenant2: str | None, user2: str | None
) -> None:
    """Requests that differ in an attribute of `by` have different subjects."""
    by = ["tenant", "user"]
    one = subject_of_request(Request(tenant=tenant, user=user), by)
    other = subject_of_request(Request(tenant=tenant2, user=user2), by)
    assert (one == other) == ((tenant, user) == (tenant2, user2))


@pytest.mark.parametrize("by", [["user"], ("tenant", "user"), ["x" * 9], ["a_1", "Ünïcode"]])
def test_valid_by(by: Any) -> None:
    """Attribute names are returned as a tuple."""
    assert check_by(by) == tuple(by)


@pytest.mark.parametrize(
    ("by", "problem"),
    [
        ("user", "by='user' is not a list of 1 to 16 names"),
        (b"user", "is not a list of 1 to 16 names"),
        ({"user"}, "is not a list of 1 to 16 names"),
        ({"user": 1}, "is not a list of 1 to 16 names"),
        (5, "is not a list of 1 to 16 names"),
        ([], "is not a list of 1 to 16 names"),
        ([f"a{n}" for n in range(PARTS_MAX + 1)], "is not a list of 1 to 16 names"),
        (["user", "user"], "names an attribute twice"),
        (["user", ""], "'' is not an attribute name"),
        (["user", "a:b"], "'a:b' is not an attribute name"),
        (["user", 5], "5 is not an attribute name"),
        ([None], "None is not an attribute name"),
        ([["user"]], "['user'] is not an attribute name"),
    ],
)
def test_invalid_by(by: Any, problem: str) -> None:
    """The error shows the value and a correct one."""
    with pytest.raises(ConfigError) as caught:
        check_by(by)
    assert problem in str(caught.value)
    assert 'for example by=["tenant", "user"]' in str(caught.value)


def test_the_bounds_are_those_of_the_documentation() -> None:
    """A key has at most 512 characters and 16 parts."""
    assert (KEY_LENGTH_MAX, PARTS_MAX) == (512, 16)


@pytest.mark.parametrize(
    ("tenant", "user"),
    [("t" * 250, "u" * 300), ("t" * 500, "u"), ("t" * 500, "u" * 500), ("é" * 300, "ü" * 300)],
)
def test_values_that_are_too_long_together_count_as_their_digests(tenant: str, user: str) -> None:
    """Each value alone would be valid, so they are valid together, and different from others."""
    by = ["tenant", "user"]
    subject = subject_of_request(Request(tenant=tenant, user=user), by)
    assert len(subject) <= KEY_LENGTH_MAX
    assert subject == subject_of_request(Request(tenant=tenant, user=user), by)
    others = [
        Request(tenant=tenant + "x", user=user),
        Request(tenant=tenant, user=user + "x"),
        Request(tenant=user, user=tenant),
    ]
    assert subject not in {subject_of_request(other, by) for other in others}


def forgeries(victim: Request, by: list[str]) -> list[str]:
    """Return values that an attacker may try: pieces of the subject, and digests of its parts."""
    subject = subject_of_request(victim, by)
    parts = [f"{name}:{getattr(victim, name)}" for name in by]
    texts = [*parts, *(part.partition(":")[2] for part in parts), *subject.split(SEPARATOR)]
    digests = [blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]
    pieces = [part[start:] for part in subject.split(SEPARATOR) for start in range(len(part))]
    return [*texts, *pieces, *(mark + digest for mark in ("", "#", ":#") for digest in digests)]


_VALUE = st.text("ab:#0", max_size=60) | st.integers(40, 480).map(lambda length: "x" * length)


@given(_VALUE, _VALUE, st.data())
@example("t" * 480, "u" * 60, None)
def test_no_value_counts_as_the_digest_of_another(
    tenant: str, user: str, data: st.DataObject | None
) -> None:
    """A client that knows the subject of another one, and the digest in it, has its own count."""
    by = ["tenant", "user"]
    victim = Request(tenant=tenant, user=user)
    subject = subject_of_request(victim, by)
    assert len(subject) <= KEY_LENGTH_MAX
    assert all(part.isprintable() for part in subject.split(SEPARATOR))
    tried = forgeries(victim, by)
    for value in tried if data is None else [data.draw(st.sampled_from(tried))]:
        for forged in (Request(tenant=tenant, user=value), Request(tenant=value, user=user)):
            assert (subject_of_request(forged, by) == subject) is (forged == victim)
