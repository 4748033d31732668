"""Patterns: tables of matches, comparisons with naive matchers, and linear time."""

from __future__ import annotations

import fnmatch
import ipaddress
import random
import re
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.rules.matching.patterns import (
    ENDPOINT_LENGTH_MAX,
    GLOB_LENGTH_MAX,
    REGEX_LENGTH_MAX,
    SEGMENTS_MAX,
    Glob,
    Regexes,
    Wildcard,
    address_of,
    compile_endpoint,
    compile_glob,
    compile_method,
    compile_network,
    decoded,
    escaped,
    normalised,
    spellings,
)

ONE, MANY = Wildcard.ONE, Wildcard.MANY


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        # Exactly that path, in any spelling.
        (
            "/login",
            "/login /login/ //login /login?a=b /%6Cogin /x/../login",
            "/Login /login/x / /l",
        ),
        ("/login/", "/login /login/", "/login/x"),
        ("login", "/login login", "/a/login"),
        ("/", "/ // ?", "/a"),
        ("/caf%C3%A9", "/café /caf%c3%a9", "/cafe"),
        ("/a.b", "/a.b", "/aXb"),
        ("/v1/orders:batch", "/v1/orders:batch /v1/orders%3abatch", "/v1/orders"),
        # A parameter is one segment.
        ("/users/{id}", "/users/42 /users/42/ /users/a%2Fb", "/users /users/ /users/42/x /users//"),
        ("/users/{id:int}", "/users/42 /users/x", "/users/4/2"),
        ("/users/<int:id>", "/users/42", "/users/4/2"),
        ("/users/<id>/pets", "/users/42/pets", "/users/pets /users/42/pets/1"),
        ("/users/{id}/pets/{pet}", "/users/1/pets/2", "/users/1/pets /users/1/cats/2"),
        ("/files/{name}.txt", "/files/a.txt /files/a.b.txt", "/files/.txt /files/a/b.txt /files/a"),
        ("/days/{from}-{to}", "/days/1-2 /days/1-2-3", "/days/- /days/1- /days/-2 /days/1/-2"),
        ("/{tenant}/login", "/acme/login", "/login /a/b/login"),
        # The rest is any number of segments.
        ("/files/{path...}", "/files /files/ /files/a /files/a/b/c", "/filesystem / /a/files"),
        ("/files/{path:path}", "/files /files/a/b", "/filesystem"),
        ("/files/<path:path>", "/files /files/a/b", "/filesystem"),
        ("/files/{path:path}/raw", "/files/raw /files/a/b/raw", "/files/a /files/raw/b"),
        # A star at the very end is the rest.
        ("/v1/orders/*", "/v1/orders /v1/orders/ /v1/orders/1 /v1/orders/1/x", "/v1/orders2 /v1"),
        ("/v1/orders*", "/v1/orders /v1/orders2 /v1/orders/1 /v1/orders2/x/y", "/v1/order /v1"),
        ("*", "/ /a /a/b", ""),
        ("/*", "/ /a /a/b", ""),
        ("/a*b*", "/ab /aXbY /ab/c", "/a/b /a /b"),
        # Any other star stays in its segment.
        ("/v1/*/items", "/v1/a/items", "/v1/items /v1/a/b/items /v1/a/items/1"),
        ("/v1/a*z/items", "/v1/az/items /v1/abz/items", "/v1/a/z/items /v1/ab/items"),
        ("/*.php", "/index.php /.php /a.b.php", "/index.phpx /a/index.php /index"),
        ("/*/", "/ /a /a/b", ""),
        # Two stars are any number of segments, also none.
        ("/v1/**", "/v1 /v1/a /v1/a/b", "/v10 /"),
        ("/**/items", "/items /a/items /a/b/items", "/itemsX /a/items/b"),
        ("/v1/**/items/*", "/v1/items /v1/a/items/b", "/v1 /v1/a"),
        ("/**/a/**/b", "/a/b /x/a/y/b /a/a/b/b", "/b/a /a /ab"),
        ("/**/{id}", "/a /a/b/c", "/"),
        ("**", "/ /a /a/b", ""),
        # A question mark is one character.
        ("/pages/?.html", "/pages/1.html /pages/%C3%A9.html", "/pages/.html /pages/12.html"),
        ("/a?b", "/axb /a%3Ab", "/a/b /ab /a%3Fb"),
        # Literals that would be wildcards.
        ("/a%2A", "/a* /a%2a", "/ab /a"),
        ("/%7Bid%7D", "/{id} /%7bid%7D", "/42"),
        ("/what%3F", "/what%3f", "/what /whatX"),
        ("/a[b]+(c)|d$", "/a[b]+(c)|d$", "/ab"),
    ],
)
def test_endpoints(pattern: str, matched: str, not_matched: str) -> None:
    """The pattern matches each path of the first column and none of the second."""
    endpoint = compile_endpoint(pattern)
    assert [path for path in matched.split(" ") if not endpoint.matches(path)] == []
    assert [path for path in not_matched.split() if endpoint.matches(path)] == []


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        (
            "re:/v[0-9]+/orders",
            "/v1/orders /v22/orders/ /v1//orders?x",
            "/v1/orders/1 /x/v1/orders",
        ),
        ("re:/users/[^/]+", "/users/42 /users/a%2Fb", "/users /users/4/2"),
        ("re:/admin/.*", "/admin/x /admin/a/b /admin/%0A /admin/%ff /admin/\udcff", "/admin"),
        ("re:/(?i)login", "/login /LOGIN", "/log"),
        (r"re:/\pL+", "/é /abc", "/1"),
        ("re:.*", "/ /a/b", ""),
        ("re:a|b", "", "/a /b"),
        ("re:/", "/", "/a"),
        ("re:/(a|b)", "/a /b", "/ab /c"),
        ("re:/é+", "/%C3%A9 /éé", "/e"),
    ],
)
def test_regular_expressions(pattern: str, matched: str, not_matched: str) -> None:
    """The pattern must match the whole normalised path."""
    endpoint = compile_endpoint(pattern)
    assert [path for path in matched.split() if not endpoint.matches(path)] == []
    assert [path for path in not_matched.split() if endpoint.matches(path)] == []


@pytest.mark.parametrize(
    ("pattern", "exact", "segments", "regex"),
    [
        ("/v1//orders/", "/v1/orders", (), None),
        ("/", "/", (), None),
        ("/a%2Ab", "/a*b", (), None),
        ("/users/{id}", None, ("users", ONE), None),
        ("/v1/*/items", None, ("v1", ONE, "items"), None),
        ("/v1/*", None, ("v1", MANY), None),
        ("/v1/**/**/*", None, ("v1", MANY), None),
        ("/**/items", None, (MANY, "items"), None),
        ("/files/{path...}", None, ("files", MANY), None),
        ("re:/v1/.*", None, (), "/v1/.*"),
    ],
)
def test_parts_of_an_endpoint(
    pattern: str, exact: str | None, segments: tuple[Any, ...], regex: str | None
) -> None:
    """Exactly one of `exact`, `segments` and `regex` is set."""
    endpoint = compile_endpoint(pattern)
    assert (endpoint.exact, endpoint.segments, endpoint.regex) == (exact, segments, regex)
    assert endpoint.text == pattern


def test_globs_within_a_segment() -> None:
    """A part of a segment is a glob of that segment; a star at the end adds the rest."""
    files, glob, rest = compile_endpoint("/files/report-*").segments
    assert (files, rest) == ("files", MANY)
    assert isinstance(glob, Glob)
    assert glob.matches("report-7")
    assert not glob.matches("report")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "has 0 characters; write 1 to 1,024"),
        ("/" + "x" * ENDPOINT_LENGTH_MAX, "has 1,025 characters; write 1 to 1,024"),
        ("/a" * (SEGMENTS_MAX + 1), "has 65 segments, more than 64"),
        (None, "is not text"),
        (b"/a", "is not text"),
        (" /a", "space before or after"),
        ("POST /v1/orders", "begins with a method"),
        ("https://api.example/v1", "names a host; write the path alone"),
        ("/a#b", "has a fragment"),
        ("/search?q=x", "has a query"),
        ("/a/../b", "has a segment .., which paths are compared without"),
        ("/a/%2e/b", "has a segment ., which paths are compared without"),
        ("/a**", "** has other characters beside it; write * within a segment"),
        ("/a**b/c", "** has other characters beside it"),
        ("/***", "** has other characters beside it"),
        ("/v{path...}", "the rest of the path has other characters beside it"),
        ("/{path:path}.txt", "the rest of the path has other characters beside it"),
        ("/{id", "the { at character 1 does not belong to a parameter; write {id} for one segment"),
        ("/id}", "or %7D for the character itself"),
        ("/{}", "does not belong to a parameter"),
        ("/{a b}", "does not belong to a parameter"),
        (r"/{id:\d+}", "does not belong to a parameter"),
        ("/<string(length=2):lang>", "does not belong to a parameter"),
        ("/a<b", "or %3C for the character itself"),
        ("re:", "has 0 characters"),
        ("re:" + "x" * (REGEX_LENGTH_MAX + 1), "has 1,025 characters; write 1 to 1,024"),
        ("re:(", "'(': missing ): (; it is an RE2 pattern"),
        ("re:/a(?=b)", "'/a(?=b)': invalid perl operator: (?="),
        (r"re:/(a)\1", r"invalid escape sequence: \1"),
        ("re:/a{2000}", "invalid repetition size: {2000}"),
        ("re:/(a\nb", r"missing ): /(a\nb"),
        ("re:/(((a{30}){30}){1})" + "x{900}" * 30, "need more than 1,048,576 bytes"),
        ("re:/users/", "ends with a slash, but paths are compared without it; write '/users'"),
        ("re: /a", "has a space around it"),
        ("re:/\ud800", "half of a surrogate pair"),
    ],
    ids=range(35),
)
def test_a_wrong_endpoint_shows_a_correct_one(pattern: Any, says: str) -> None:
    """The error shows the pattern, the mistake and a correct example."""
    with pytest.raises(ConfigError) as caught:
        compile_endpoint(pattern)
    assert says in str(caught.value)
    assert str(caught.value).encode()


def test_regular_expressions_are_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RE2 all other patterns work, and the error names the package to install."""
    monkeypatch.setitem(sys.modules, "re2", None)
    assert compile_endpoint("/v1/*").matches("/v1/a")
    with pytest.raises(ConfigError, match=r"pip install 'ratekeeper\[rules\]'"):
        compile_endpoint("re:/v1")


def test_many_regular_expressions_are_one_automaton() -> None:
    """All that match are found at once, and an invalid one among them is named."""
    regexes = Regexes([f"/v[0-9]+/s{number}/.*" for number in range(5_000)] + ["/v1/s7/.*"])
    assert regexes.matching("/v1/s7/x") == [7, 5_000]
    assert regexes.matching("/v1/s5000/x") == []
    assert Regexes([]).matching("/") == []
    with pytest.raises(ConfigError, match=r"'\(': missing"):
        Regexes(["/a", "(", "/b"])


def test_an_automaton_that_exceeds_its_memory_is_correct() -> None:
    """This pattern has 2**200 states. RE2 rebuilds its automaton often, and every result is
    correct."""
    endpoint = compile_endpoint("re:/(a|b)*a(a|b){200}")
    source = random.Random(5)
    for _ in range(20):
        text = "".join(source.choices("ab", k=20_000))
        assert endpoint.matches("/" + text) is (text[-201] == "a")


NAMES = st.sampled_from(["{id}", "{id:int}", "<id>", "<uuid:id>", "{p...}", "{p:path}", "<path:p>"])
LITERALS = st.sampled_from(["a", "b", "ab", "v1", "a.b"])


@given(st.lists(LITERALS | NAMES | st.sampled_from(["{a}-{b}", "v{n}", "{n}.json"]), max_size=5))
def test_a_template_matches_its_own_text(segments: list[str]) -> None:
    """A rule applies to requests whose endpoint is the route template itself."""
    template = "/" + "/".join(segments)
    assert compile_endpoint(template).matches(template)


def _naive_glob(pattern: str, value: str) -> bool:
    """Match a glob by trying everything."""
    if not pattern:
        return not value
    if pattern[0] == "*":
        return any(_naive_glob(pattern[1:], value[n:]) for n in range(len(value) + 1))
    return bool(value) and pattern[0] in {"?", value[0]} and _naive_glob(pattern[1:], value[1:])


def _naive_path(pattern: list[str], path: list[str]) -> bool:
    """Match a path by trying everything; `**` is any number of segments."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_naive_path(pattern[1:], path[n:]) for n in range(len(path) + 1))
    return bool(path) and _naive_glob(pattern[0], path[0]) and _naive_path(pattern[1:], path[1:])


# For each way to write a segment, the glob that it means.
WRITTEN = {
    "a": "a",
    "ab": "ab",
    "*": "?*",
    "{id}": "?*",
    "**": "**",
    "{p...}": "**",
    "a*": "a*",
    "*b": "*b",
    "*a*b": "*a*b",
    "?": "?",
    "?b*a": "?b*a",
    "{n}b": "?*b",
    "{x}a{y}": "?*a?*",
}
PATH_SEGMENTS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=6)


@given(st.lists(st.sampled_from(sorted(WRITTEN)), min_size=1, max_size=5), PATH_SEGMENTS)
def test_endpoints_agree_with_a_naive_matcher(written: list[str], path: list[str]) -> None:
    """Every combination of wildcards gives the result of an exhaustive search."""
    meant = [WRITTEN[segment] for segment in written]
    if written[-1] == "*":
        meant[-1] = "**"
    elif written[-1].endswith("*") and written[-1] != "**":
        meant.append("**")
    endpoint = compile_endpoint("/" + "/".join(written))
    assert endpoint.matches("/" + "/".join(path)) is _naive_path(meant, path)
    assert endpoint.accepts("/" + "/".join(path)) is _naive_path(meant, path)


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        ("sk_1", "sk_1", "sk_10 SK_1 sk_"),
        ("sk_*", "sk_ sk_1 sk_a/b", "sk pk_1"),
        ("*", "x", ""),
        ("*_test", "_test sk_test", "sk_tests"),
        ("sk_*_test", "sk__test sk_1_test sk_a_b_test", "sk_test sk_1_live"),
        ("v?", "v1 vé", "v v12"),
        ("v[12]", "v1 v2", "v3 v v12"),
        ("v[!12]", "v3", "v1 v2 v"),
        ("v[0-9a-f]", "v0 v7 vc", "vg v-"),
        ("[a-]", "a -", "b"),
        ("[]a]", "] a", "b"),
        ("[!]a]", "b", "] a"),
        ("[^a]", "^ a", "b"),
        (r"[\d]", "\\ d", "1"),
        ("[*]a", "*a", "ba"),
        ("a[[]b]", "a[b]", "ab"),
        ("a.b|c", "a.b|c", "aXb c"),
        ("a{1}", "a{1}", "a"),
    ],
)
def test_globs(pattern: str, matched: str, not_matched: str) -> None:
    """The pattern matches each value of the first column and none of the second."""
    glob = compile_glob(pattern)
    assert [value for value in matched.split() if not glob.matches(value)] == []
    assert [value for value in not_matched.split() if glob.matches(value)] == []


def test_a_glob_matches_any_character() -> None:
    """Newlines and halves of surrogate pairs are ordinary characters."""
    for character in "\n\r\0\u2028\ud800":
        assert compile_glob("a*").matches(f"a{character}b")
        assert compile_glob("a?b").matches(f"a{character}b")
        assert compile_glob("a[!x]b").matches(f"a{character}b")


@pytest.mark.parametrize(
    ("pattern", "exact", "prefix", "is_prefix"),
    [
        ("sk_1", "sk_1", "sk_1", False),
        ("sk_*", None, "sk_", True),
        ("sk_**", None, "sk_", True),
        ("*", None, "", True),
        ("sk_*_test", None, "sk_", False),
        ("sk_?", None, "sk_", False),
        ("?", None, "", False),
        ("[*]", "*", "*", False),
        ("a[?]b[[]*", None, "a?b[", True),
        ("a[bc]", None, "a", False),
    ],
)
def test_parts_of_a_glob(pattern: str, exact: str | None, prefix: str, is_prefix: bool) -> None:
    """The exact value, or the literal start and whether the rest is one star."""
    glob = compile_glob(pattern)
    assert (glob.exact, glob.prefix, glob.is_prefix) == (exact, prefix, is_prefix)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "has 0 characters; write 1 to 512"),
        ("x" * (GLOB_LENGTH_MAX + 1), "has 513 characters; write 1 to 512, for example sk_live_*"),
        (42, "42 is not text"),
        ("ab[c", "the set [ at character 3 is not closed; write [abc]"),
        ("[]", "the set [ at character 1 is not closed"),
        ("[!]", "the set [ at character 1 is not closed"),
        ("[z-a]", "the range 'z-a' is empty; write 'a-z'"),
    ],
    ids=range(7),
)
def test_a_wrong_glob_shows_a_correct_one(pattern: Any, says: str) -> None:
    """The error shows the pattern, the mistake and a correct example."""
    with pytest.raises(ConfigError) as caught:
        compile_glob(pattern)
    assert says in str(caught.value)


@given(
    st.lists(
        st.sampled_from(["a", "b", "*", "?", ".", "[ab]", "[!a]", "[a-c]", "[*]"]), min_size=1
    ),
    st.text(alphabet="abc.*", max_size=12),
)
def test_globs_agree_with_the_standard_library(tokens: list[str], value: str) -> None:
    """Every combination matches what `fnmatch` matches."""
    pattern = "".join(tokens)
    assert compile_glob(pattern).matches(value) is fnmatch.fnmatchcase(value, pattern)


@given(st.text(alphabet="ab*?", min_size=1, max_size=8), st.text(alphabet="ab", max_size=8))
def test_globs_agree_with_a_naive_matcher(pattern: str, value: str) -> None:
    """Every combination gives the result of an exhaustive search."""
    assert compile_glob(pattern).matches(value) is _naive_glob(pattern, value)


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_an_escaped_value_matches_only_itself(value: str, other: str) -> None:
    """Any value can be written as a glob that matches nothing else."""
    glob = compile_glob(escaped(value))
    assert glob.exact == value
    assert glob.matches(value)
    assert glob.matches(other) is (value == other)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/" + "**/a/" * 30 + "c", "/a" * 100_000),
        ("/" + "**/{x}/a/" * 20 + "c", "/a" * 100_000),
        ("/**/" + "*a" * 100 + "*b/**/c", "/" + "a" * 100_000),
        ("/**/" + "*a" * 100 + "*b/**/c", ("/" + "a" * 100) * 1_000),
        ("/" + "{x}a" * 50 + "b", "/" + "a" * 100_000),
        ("re:/(x+x+)+y", "/" + "x" * 100_000),
        ("re:/(.*a){20}c", "/" + "a" * 100_000),
    ],
    ids=range(7),
)
def test_no_endpoint_takes_exponential_time(pattern: str, path: str) -> None:
    """Patterns that a backtracking matcher would never finish are matched at once."""
    assert not compile_endpoint(pattern).matches(path)


@pytest.mark.parametrize(
    "pattern", ["*a" * 200 + "*b", "*a?" * 150 + "b", "*[ab]" * 80 + "b", "*" * 500 + "b"]
)
def test_no_glob_takes_exponential_time(pattern: str) -> None:
    """The same for globs: a million characters and hundreds of stars."""
    assert not compile_glob(pattern).matches("a" * 1_000_000)
    assert compile_glob(pattern).matches("a" * 1_000_000 + "b")


ANY_TEXT = st.text(alphabet=st.characters(codec=None, categories=None), max_size=40)


@given(ANY_TEXT | st.text(alphabet="/*?{}<>:.%[]re\\()+|^$#2Fa-", max_size=40), ANY_TEXT)
def test_any_text_is_an_endpoint_or_an_error(pattern: str, path: str) -> None:
    """No text raises another error; a compiled pattern accepts any path."""
    for text in (pattern, f"re:{pattern}"):
        try:
            endpoint = compile_endpoint(text)
        except ConfigError as error:
            str(error).encode()
        else:
            assert endpoint.matches(path) in {True, False}


@given(ANY_TEXT | st.text(alphabet="*?[]!-^\\ab", max_size=40), ANY_TEXT)
def test_any_text_is_a_glob_or_an_error(pattern: str, value: str) -> None:
    """No text raises another error; a compiled pattern accepts any value."""
    try:
        glob = compile_glob(pattern)
    except ConfigError as error:
        str(error).encode()
    else:
        assert glob.matches(value) in {True, False}
        assert value.startswith(glob.prefix) or not glob.matches(value)


@pytest.mark.parametrize(
    ("network", "address", "is_in"),
    [
        ("10.0.0.0/8", "10.0.0.0", True),
        ("10.0.0.0/8", "10.255.255.255", True),
        ("10.0.0.0/8", "11.0.0.0", False),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
        ("10.0.0.0/8", "::FFFF:0a01:0203", True),
        ("10.0.0.0/8", "::10.1.2.3", False),
        ("::ffff:10.0.0.0/104", "10.1.2.3", True),
        ("::ffff:10.1.2.3", "10.1.2.3", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("192.0.2.7/32", "192.0.2.7", True),
        ("0.0.0.0/0", "255.255.255.255", True),
        ("0.0.0.0/0", "::1", False),
        ("::/0", "::1", True),
        ("::/0", "1.2.3.4", False),
        ("::/0", "::ffff:1.2.3.4", False),
        ("2001:db8::/32", "2001:0DB8:0:0::1", True),
        ("2001:db8::/32", "2001:db9::1", False),
        ("fe80::/10", "fe80::1%eth0", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        # A text that is not an address is in no network.
        ("0.0.0.0/0", "", False),
        ("0.0.0.0/0", "1.2.3", False),
        ("0.0.0.0/0", "1.2.3.4:80", False),
        ("0.0.0.0/0", "01.2.3.4", False),
        ("0.0.0.0/0", " 1.2.3.4", False),
        ("0.0.0.0/0", "1.2.3.4%eth0", False),
        ("0.0.0.0/0", "1.2.3.4\0", False),
        ("0.0.0.0/0", "1.2.3.4/32", False),
        ("0.0.0.0/0", "\ud800", False),
        ("0.0.0.0/0", "unknown", False),
        ("::/0", "[::1]", False),
        ("::/0", ":::", False),
        ("::/0", "::1\0", False),
        ("::/0", "::\ud800", False),
    ],
)
def test_networks(network: str, address: str, is_in: bool) -> None:
    """The network contains the address, or it does not."""
    assert compile_network(network).contains(address) is is_in


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.3/32", "10.1.2.3"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("2001:DB8:0::/32", "2001:db8::/32"),
        ("::1/128", "::1"),
        ("0.0.0.0/0", "0.0.0.0/0"),
    ],
)
def test_a_network_prints_in_its_usual_form(text: str, shown: str) -> None:
    """Each network has one printed form."""
    assert str(compile_network(text)) == shown
    assert compile_network(shown) == compile_network(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.1/8", "write 10.0.0.0/8 for the whole network, or the address alone"),
        ("2001:db8::1/32", "write 2001:db8::/32 for the whole network"),
        ("::ffff:10.0.0.1/104", "after its first 104 bits; write 10.0.0.0/8"),
        ("10.0.0.0/33", "must be from 0 to 32"),
        ("::/129", "must be from 0 to 128"),
        ("::ffff:10.0.0.0/95", "must be from 96 to 128"),
        ("10.0.0.0/", "the prefix length after the slash must be"),
        ("10.0.0.0/-1", "the prefix length after the slash must be"),
        ("10.0.0.0/+8", "the prefix length after the slash must be"),
        ("10.0.0.0/08", "the prefix length after the slash must be"),
        ("10.0.0.0/٨", "the prefix length after the slash must be"),
        ("10.0.0.0/8/8", "the prefix length after the slash must be"),
        ("10.0.0.0/255.0.0.0", "the prefix length after the slash must be"),
        ("10.0.0/8", "'10.0.0' is not an address; write it like 10.0.0.0/8"),
        ("10.0.*", "is not an address"),
        ("", "is not an address"),
        ("localhost", "is not an address"),
        ("fe80::1%eth0", "is not an address"),
        (" 10.0.0.0/8", "is not an address"),
        (None, "is not text"),
        (10, "is not text"),
    ],
)
def test_a_wrong_network_shows_a_correct_one(text: Any, says: str) -> None:
    """The error shows the text, the mistake and a correct example."""
    with pytest.raises(ConfigError) as caught:
        compile_network(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


def _reference(text: str) -> tuple[int, int] | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    return address.version, int(address)


ADDRESSES = st.ip_addresses().map(str) | st.builds(
    lambda address: f"::ffff:{address}", st.ip_addresses(v=4)
)


@given(ADDRESSES | st.text(alphabet="0123456789abcdef:./f") | st.text())
def test_addresses_are_those_of_the_standard_library(text: str) -> None:
    """`address_of` reads every text as `ipaddress` does."""
    assert address_of(text) == _reference(text)


@given(st.ip_addresses(), st.integers(0, 128), st.ip_addresses(), st.integers(0, 128))
def test_networks_are_those_of_the_standard_library(
    start: Any, length: int, other: Any, low_bits: int
) -> None:
    """A network contains the same addresses as with `ipaddress`, also near its edges."""
    assume(getattr(start, "ipv4_mapped", None) is None)  # those are IPv4 here; the table has them
    length = min(length, start.max_prefixlen)
    network = ipaddress.ip_network((int(start), length), strict=False)
    flipped = int(start) ^ (1 << min(low_bits, start.max_prefixlen - 1))
    compiled = compile_network(str(network))
    for address in (start, other, type(start)(flipped)):
        # An IPv4-mapped IPv6 address is IPv4.
        plain = getattr(address, "ipv4_mapped", None) or address
        assert compiled.contains(str(address)) is (plain in network)


@given(st.text() | st.text(alphabet="0123456789abcdef:./%"))
def test_any_text_is_a_network_or_an_error(text: str) -> None:
    """No text raises another error, and every message can be printed."""
    try:
        network = compile_network(text)
    except ConfigError as error:
        str(error).encode()
    else:
        assert compile_network(str(network)) == network


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
        # Characters that would change the meaning stay encoded, in capitals.
        ("/group%2fproject", "/group%2Fproject"),
        ("/what%3f", "/what%3F"),
        ("/c%23", "/c%23"),
        ("/100%25", "/100%25"),
        ("/%252e%252e/login", "/%252e%252e/login"),
        # Invalid percent-encoding, and bytes that are not UTF-8.
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
    """Every spelling on the left is normalised to the path on the right, which stays unchanged."""
    assert normalised(path) == normal
    assert normalised(normal) == normal


# Texts with many characters of paths.
PATHS = st.text(alphabet="/.%?#:ab2eEfF5é\udcff\ud800") | st.text(
    alphabet=st.characters(codec=None, categories=None)
)


@given(PATHS)
def test_normalising_twice_changes_nothing(path: str) -> None:
    """Any text has a normal form that begins with a slash and is its own normal form."""
    normal = normalised(path)
    assert normalised(normal) == normal
    assert normal.encode()
    assert normal == "/" or (normal.startswith("/") and not normal.endswith("/"))
    assert "//" not in normal
    assert not {"?", "#"} & set(normal)
    assert not {".", ".."} & set(normal.split("/"))


@st.composite
def respelled(draw: st.DrawFn) -> tuple[str, str]:
    """Return a path, and another spelling of it as a client may send it."""
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
def test_no_spelling_evades_a_limit(pair: tuple[str, str]) -> None:
    """With any added slashes, dots and percent-encoding, it is the same path."""
    path, written = pair
    assert normalised(written) == path


@st.composite
def dotted(draw: st.DrawFn) -> str:
    """Return a path with dot segments in some of their spellings."""
    pieces = st.sampled_from(["a", "b", "..", ".", "%2e%2e", ".%2E", "%2e", "", "c%2Fd", "x\\y"])
    slashes = st.sampled_from(["/", "/", "//", "%2f", "\\", "%5C"])
    return "".join(draw(slashes) + each for each in draw(st.lists(pieces, max_size=6)))


@given(dotted())
def test_the_spellings_include_the_literal_and_the_resolved_path(path: str) -> None:
    """As nginx, an application that routes literally, and WHATWG's URL parser read it."""
    found = spellings(path)
    assert found[0] == normalised(path)
    assert len(set(found)) == len(found) <= 11
    assert all(each.startswith("/") and "//" not in each for each in found)
    literal = [decoded(each) for each in path.rstrip("/").split("/")]
    assert "/" + "/".join(filter(None, literal)) in found
    assert _whatwg(path) in found
    slashed = re.sub(r"\\|%2f|%5c", "/", path, flags=re.IGNORECASE)
    if not {".", ".."}.isdisjoint(map(decoded, slashed.split("/"))):
        assert _whatwg(slashed) in found


def _whatwg(path: str) -> str:
    """Resolve dot segments as the URL standard does: an empty segment is a segment."""
    kept: list[str] = []
    for segment in path.rstrip("/").removeprefix("/").split("/"):
        plain = decoded(segment)
        if plain == "..":
            del kept[-1:]
        elif plain != ".":
            kept.append(plain)
    return "/" + "/".join(filter(None, kept))


def test_long_paths_take_linear_time() -> None:
    """Hundreds of thousands of the worst characters for each step finish."""
    for piece in ("/a/..", "%", "%41", "//", "/.", "a:", "\udcff", "?#"):
        normalised(piece * 200_000)
        normalised("/" + piece * 200_000)


@pytest.mark.parametrize(
    ("text", "plain"),
    [("a%2Ab", "a*b"), ("%2F%3F%23%25", "%2F%3F%23%25"), ("%", "%25"), ("", ""), ("a b", "a b")],
)
def test_decoding(text: str, plain: str) -> None:
    """Only characters that have a meaning in a path stay encoded."""
    assert decoded(text) == plain


@pytest.mark.parametrize("text", ["POST", "post", "Post"])
def test_methods_are_upper_case(text: str) -> None:
    """A method in any case is normalised to upper case."""
    assert compile_method(text) == "POST"


@pytest.mark.parametrize(
    "text", ["", " POST", "POST ", "POST,GET", "*", "x" * 33, "PÖST", "POST\n", 7, None, ["POST"]]
)
def test_a_wrong_method(text: Any) -> None:
    """The error shows a correct method."""
    with pytest.raises(ConfigError, match=r"is not an HTTP method; for example POST"):
        compile_method(text)


# ── Decoding ───────────────────────────────────────────────────────────────────────────────────

PIECES = ["%", "%2", "%2f", "%2F", "%41", "%c3", "%a9", "%ff", "%5c", "%25", "%3f", "%23", "%0a"]
OTHER = ["\\", "=", "=\n", "=3D", "\r\n", " ", "a", "/", ".", "é", "\udcff", "\ud800", "_", "\0"]


def decoded_one_by_one(text: str) -> str:
    """Decode escapes as the definition says, each by itself."""
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        encoded = text.encode("utf-8", "surrogatepass")

    def byte_of(found: re.Match[bytes]) -> bytes:
        if found[1] is None:
            return b"%25"
        byte = bytes.fromhex(found[1].decode())
        return found[0].upper() if byte in b"/?#%" else byte

    plain = re.sub(rb"%([0-9A-Fa-f]{2})?", byte_of, encoded).decode("utf-8", "surrogateescape")
    return re.sub(r"[\udc80-\udcff]", lambda found: f"%{ord(found[0]) - 0xDC00:02X}", plain)


@given(st.lists(st.sampled_from([*PIECES, *OTHER]) | st.text(max_size=2), max_size=12).map("".join))
def test_escapes_are_decoded_as_if_one_by_one(text: str) -> None:
    """The decoder takes all of them at once; without an escape, ASCII is left alone."""
    assert decoded(text) == decoded_one_by_one(text)
