"""One spelling for each path: whatever a client writes, it is the same path to every pattern."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.core.errors import ConfigError
from tollkeeper.rules.matching.paths import compile_method, decoded, normalised


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        # As they are.
        ("/", "/"),
        ("/login", "/login"),
        ("/v1/orders/42", "/v1/orders/42"),
        ("/.well-known/security.txt", "/.well-known/security.txt"),
        ("/a/...", "/a/..."),
        ("/a/.b/c.", "/a/.b/c."),
        ("/v1/orders:batch", "/v1/orders:batch"),
        ("/pkg.Service/Method", "/pkg.Service/Method"),
        ("/users/{id}", "/users/{id}"),
        ("/files/{path:path}", "/files/{path:path}"),
        ("/files/{path...}", "/files/{path...}"),
        ("/users/<int:id>", "/users/<int:id>"),
        ("/café", "/café"),
        # Slashes.
        ("", "/"),
        ("//", "/"),
        ("/login/", "/login"),
        ("/login//", "/login"),
        ("//login", "/login"),
        ("/v1//orders///42", "/v1/orders/42"),
        ("login", "/login"),
        ("orders.create", "/orders.create"),
        # Query, fragment, origin.
        ("/login?next=/", "/login"),
        ("/login/?next=/", "/login"),
        ("/login#top", "/login"),
        ("/login#a?b", "/login"),
        ("?a=b", "/"),
        ("http://api.example/login?x", "/login"),
        ("HTTPS://u:p@api.example:8443/v1/", "/v1"),
        ("http://api.example", "/"),
        ("/http://api.example", "/http:/api.example"),
        # Dots.
        ("/v1/./orders", "/v1/orders"),
        ("/v1/orders/.", "/v1/orders"),
        ("/public/../login", "/login"),
        ("/public/x/../../login", "/login"),
        ("/../../login", "/login"),
        ("/login/..", "/"),
        ("/v1//../login", "/login"),
        ("/public/%2e%2E/login", "/login"),
        ("/public/.%2e/login", "/login"),
        # Percent-encoding.
        ("/%6cogin", "/login"),
        ("/%6Cogin", "/login"),
        ("/v1/orders%3Abatch", "/v1/orders:batch"),
        ("/a%20b", "/a b"),
        ("/a%2Ab%7Bc%7D", "/a*b{c}"),
        ("/caf%C3%A9", "/café"),
        ("/caf%c3%a9", "/café"),
        ("/%F0%9F%99%82", "/🙂"),
        ("/a%0Ab", "/a\nb"),
        ("/a%00b", "/a\0b"),
        # What would change the meaning stays encoded, in capitals.
        ("/group%2fproject", "/group%2Fproject"),
        ("/what%3f", "/what%3F"),
        ("/c%23", "/c%23"),
        ("/100%25", "/100%25"),
        ("/%252e%252e/login", "/%252e%252e/login"),
        # What is not encoding, or not UTF-8.
        ("/100%", "/100%25"),
        ("/100%zz", "/100%25zz"),
        ("/%%34%31", "/%2541"),
        ("/%ff%C3", "/%FF%C3"),
        ("/%c0%af", "/%C0%AF"),
        ("/\udcff", "/%FF"),
        ("/\ud800", "/%ED%A0%80"),
        ("/caf\udcc3\udca9", "/café"),
        # Case is kept.
        ("/Login", "/Login"),
        ("/a;v=1", "/a;v=1"),
    ],
)
def test_each_path_has_one_spelling(path: str, normal: str) -> None:
    """Every spelling on the left is the path on the right, and that is its own."""
    assert normalised(path) == normal
    assert normalised(normal) == normal


# Texts that are dense in what paths are made of.
PATHS = st.text(alphabet="/.%?#:ab2eEfF5é\udcff\ud800") | st.text(
    alphabet=st.characters(codec=None, categories=None)
)


@given(PATHS)
def test_normalising_twice_changes_nothing(path: str) -> None:
    """Any text has a normal form, which is text, begins with a slash and is its own."""
    normal = normalised(path)
    assert normalised(normal) == normal
    assert normal.encode()
    assert normal == "/" or (normal.startswith("/") and not normal.endswith("/"))
    assert "//" not in normal
    assert not {"?", "#"} & set(normal)
    assert not {".", ".."} & set(normal.split("/"))


@st.composite
def respelled(draw: st.DrawFn) -> tuple[str, str]:
    """A path, and another spelling of it as a client may try it."""
    segments = draw(st.lists(st.sampled_from(["login", "v1", "a b", "é", ".x"]), max_size=4))
    written = draw(st.sampled_from(["", "http://host", "/"]))
    for segment in segments:
        written += draw(st.sampled_from(["/", "//", "/./", "/x/../", "/y/%2E./", "/%2e/"]))
        for character in segment:
            code = "".join(f"%{byte:02x}" for byte in character.encode())
            written += draw(st.sampled_from([character, code, code.upper()]))
    written += draw(st.sampled_from(["", "/", "//", "/.", "?q=1", "/?a=/../x", "#f"]))
    return "/" + "/".join(segments), written


@given(respelled())
def test_no_spelling_slips_past(pair: tuple[str, str]) -> None:
    """However slashes, dots and percents are put in, it is the same path."""
    path, written = pair
    assert normalised(written) == path


def test_long_paths_take_linear_time() -> None:
    """Hundreds of thousands of what is worst for each step finish."""
    for piece in ("/a/..", "%", "%41", "//", "/.", "a:", "\udcff", "?#"):
        normalised(piece * 200_000)
        normalised("/" + piece * 200_000)


@pytest.mark.parametrize(
    ("text", "plain"),
    [("a%2Ab", "a*b"), ("%2F%3F%23%25", "%2F%3F%23%25"), ("%", "%25"), ("", ""), ("a b", "a b")],
)
def test_what_decoding_leaves(text: str, plain: str) -> None:
    """Only what means something as a character of a path stays encoded."""
    assert decoded(text) == plain


@pytest.mark.parametrize("text", ["POST", "post", "Post"])
def test_methods_have_no_case(text: str) -> None:
    """They are written in capitals, however they were."""
    assert compile_method(text) == "POST"


@pytest.mark.parametrize(
    "text", ["", " POST", "POST ", "POST,GET", "*", "x" * 33, "PÖST", "POST\n", 7, None, ["POST"]]
)
def test_a_wrong_method(text: Any) -> None:
    """What is no method is an error that shows one."""
    with pytest.raises(ConfigError, match=r"method .* write it like POST"):
        compile_method(text)
