"""Redis URIs and their options: the configuration they give, and the errors for wrong ones."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from string import ascii_letters
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.stores.redis import config as module
from ratekeeper.decide.stores.redis.config import (
    ADDRESSES_MAX,
    OPTIONS,
    SCHEMES,
    Address,
    RedisConfig,
    TlsOptions,
    Verify,
    parse,
)

LOCAL = (Address("localhost", 6379),)
OPTION_NAMES = tuple(OPTIONS)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("redis://localhost", RedisConfig("standalone", LOCAL)),
        ("redis://localhost/", RedisConfig("standalone", LOCAL)),
        ("valkey://localhost", RedisConfig("standalone", LOCAL)),
        ("REDIS://LocalHost:6379/0", RedisConfig("standalone", LOCAL)),
        ("redis://10.0.0.1:1/3", RedisConfig("standalone", (Address("10.0.0.1", 1),), db=3)),
        ("redis://localhost?db=15", RedisConfig("standalone", LOCAL, db=15)),
        ("redis://[::1]", RedisConfig("standalone", (Address("::1", 6379),))),
        ("redis://[0:0::1]:7/1", RedisConfig("standalone", (Address("::1", 7),), db=1)),
        ("redis://[fe80::1%25eth0]:7", RedisConfig("standalone", (Address("fe80::1%eth0", 7),))),
        ("redis://:pw@localhost", RedisConfig("standalone", LOCAL, password="pw")),
        ("redis://:@localhost", RedisConfig("standalone", LOCAL)),
        ("redis://a:b@localhost", RedisConfig("standalone", LOCAL, username="a", password="b")),
        ("redis://a:@localhost", RedisConfig("standalone", LOCAL, username="a", password="")),
        ("redis://:p:q@r@localhost", RedisConfig("standalone", LOCAL, password="p:q@r")),
        ("redis://:%2F%3f%C3%A9@localhost", RedisConfig("standalone", LOCAL, password="/?é")),
        ("redis://:1+1=2@localhost", RedisConfig("standalone", LOCAL, password="1+1=2")),
        ("redis://localhost?password=1+%26=", RedisConfig("standalone", LOCAL, password="1+&=")),
        ("redis://localhost?prefix=api:v1", RedisConfig("standalone", LOCAL, prefix="api:v1")),
        ("redis://localhost?deadline_ms=1", RedisConfig("standalone", LOCAL, deadline_ns=10**6)),
        (
            "redis://localhost?deadline_ms=2.5&connect_ms=60000",
            RedisConfig("standalone", LOCAL, deadline_ns=2_500_000, connect_ns=60 * 10**9),
        ),
        (
            "redis+unix:///run/redis.sock",
            RedisConfig("standalone", (Address("/run/redis.sock", 0),)),
        ),
        (
            "valkey+unix://a:b@/run/a%20b?db=2",
            RedisConfig("standalone", (Address("/run/a b", 0),), 2, "a", "b"),
        ),
        ("rediss://localhost", RedisConfig("standalone", LOCAL, tls=TlsOptions())),
        ("valkeys://localhost", RedisConfig("standalone", LOCAL, tls=TlsOptions())),
        (
            "rediss://localhost?tls_ca=/a.pem&tls_cert=b&tls_key=c&tls_verify=ca&tls_server_name=d",
            RedisConfig(
                "standalone", LOCAL, tls=TlsOptions(Path("/a.pem"), Path("b"), Path("c"), "ca", "d")
            ),
        ),
        (
            "redis+sentinel://s1,s2:7,s1/orders",
            RedisConfig("sentinel", (Address("s1", 26379), Address("s2", 7)), service="orders"),
        ),
        (
            "valkeys+sentinel://a:b@s1/orders/3?sentinel_username=c&sentinel_password=d",
            RedisConfig(
                "sentinel",
                (Address("s1", 26379),),
                db=3,
                username="a",
                password="b",
                tls=TlsOptions(),
                service="orders",
                sentinel_username="c",
                sentinel_password="d",
            ),
        ),
        (
            "redis+cluster://h1:7000,[::1]:7001,h3",
            RedisConfig(
                "cluster", (Address("h1", 7000), Address("::1", 7001), Address("h3", 6379))
            ),
        ),
        ("rediss+cluster://localhost/0", RedisConfig("cluster", LOCAL, tls=TlsOptions())),
    ],
)
def test_parse_reads_a_valid_uri(uri: str, expected: RedisConfig) -> None:
    """Each URI gives exactly this configuration; omitted options have their defaults."""
    assert parse(uri) == expected


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "no known scheme; the schemes are redis://, rediss://"),
        ("redis", "no known scheme"),
        ("redis:localhost", "no known scheme"),
        ("http://localhost", "no known scheme"),
        ("rediss+unix:///run/it", "no known scheme"),
        ("redis://", "address 1 has no host"),
        ("redis:///0", "address 1 has no host"),
        ("redis://:pw@", "address 1 has no host"),
        ("redis://:6379", "address 1 has no host"),
        ("redis://bü", "address 1 has no host, or its host is not a name"),
        ("redis://a..b", "address 1 has no host, or its host is not a name"),
        ("redis://" + "a" * 64, "address 1 has no host, or its host is not a name"),
        ("redis://::1", "with IPv6 in brackets"),
        ("redis://[::1", "with IPv6 in brackets"),
        ("redis://[::1]6379", "with IPv6 in brackets"),
        ("redis://[localhost]", "with IPv6 in brackets"),
        ("redis://[fe80::1%\ud800]", "with IPv6 in brackets"),
        ("redis+cluster://h1,,h3", "address 2 has no host"),
        ("redis://h,password=x", "2 addresses for one server; for several write redis+cluster://"),
        ("redis://h1,h2", "redis+sentinel://h1,h2/service"),
        ("redis+cluster://" + "h," * ADDRESSES_MAX + "h", "101 addresses; a URI has at most 100"),
        ("redis://h:", "port of address 1 is not a whole number from 1 to 65535"),
        ("redis://h:0", "port of address 1"),
        ("redis://h:65536", "port of address 1"),
        ("redis+cluster://h:1,h:-1", "port of address 2"),
        ("redis://h:٣", "port of address 1"),
        ("redis://h/one", "db is not a whole number from 0 to 2,147,483,647; for example db=0"),
        ("redis://h/-1", "db is not a whole number"),
        ("redis://h/2147483648", "db is not a whole number"),
        ("redis://h//0", "too many parts"),
        ("redis://h/0/0", "too many parts"),
        ("redis://h/0?db=0", "gives db twice"),
        ("redis://a:b@h?password=c", "gives password twice"),
        ("redis://h?prefix=a&prefix=a", "gives prefix twice"),
        ("redis://h?db", "the option db has no value; write db=…"),
        ("redis://h?dbs=1", "no option dbs; did you mean db?"),
        ("redis://h?deadlin_ms=9", "no option deadlin_ms; did you mean deadline_ms?"),
        ("redis://h?d%20b=1", "no option of that name; the options are db"),
        ("redis://h?prefix=%ff", "prefix has a % escape that is not UTF-8"),
        ("redis://:%ff@h", "the password has a % escape"),
        ("redis://a@h", "username without password; for a user without a password"),
        ("redis://h/0#top", "write / as %2F"),
        ("redis://:a/b@h", "write / as %2F"),
        ("redis://:a?b@h", "? as %3F"),
        ("redis://:a b@h", "a space as %20"),
        ("redis://h\n", "must be escaped"),
        ("redis://h?deadline_ms=0", "deadline_ms='0' is not a number of milliseconds from 1 to"),
        ("redis://h?deadline_ms=0.999999", "is not a number of milliseconds"),
        ("redis://h?deadline_ms=60000.000001", "is not a number of milliseconds"),
        ("redis://h?deadline_ms=1.0000001", "with at most 6 decimals"),
        ("redis://h?connect_ms=1e3", "connect_ms='1e3' is not"),
        ("redis://h?connect_ms=+5", "connect_ms='+5' is not"),
        ("redis://h?connect_ms=5;password=pw", r"connect_ms=\(not shown\) is not"),
        ("redis://h?prefix=", "prefix='' is not 1 to 32 printable ASCII characters"),
        ("redis://h?prefix=" + "a" * 33, "is not 1 to 32"),
        ("redis://h?prefix=a%20b", "prefix='a b' is not"),
        ("redis://h?prefix=a{b", "prefix='a{b' is not"),
        ("redis://h?prefix=é", "prefix='é' is not"),
        ("redis://h?tls_ca=/a.pem", "tls_ca without TLS; write rediss://"),
        ("rediss://h?tls_ca=", "tls_ca is not the path of a file"),
        ("rediss://h?tls_key=a", "tls_key without tls_cert"),
        ("rediss://h?tls_verify=no", "tls_verify='no' is not one of full, ca, none"),
        ("rediss://h?tls_server_name=a%20b", "tls_server_name='a b' is not a host name"),
        ("redis://h?sentinel_password=a", "are for redis+sentinel://"),
        ("redis+sentinel://h", "for example redis+sentinel://h1,h2/mymaster"),
        ("redis+sentinel://h/", "the name of the primary (the Sentinel service) is missing"),
        ("redis+sentinel://h/a%0Ab", "(the Sentinel service) is missing or invalid"),
        ("redis+sentinel://h/a/b", "db is not a whole number"),
        ("redis+sentinel://h/a?sentinel_username=b", "sentinel_username without sentinel_password"),
        ("redis+cluster://h/1", "a cluster has only database 0"),
        ("redis+cluster://h?db=1", "a cluster has only database 0"),
        ("redis+unix://run/redis.sock", "write three slashes"),
        ("redis+unix:///", "no absolute path"),
        ("redis+unix:///a%00b", "no absolute path"),
        ("redis+unix:///" + "a" * 107, "at most 107 bytes"),
        ("redis+unix:///run/it?tls_ca=a", "tls_ca without TLS"),
        ("redis://" + "h" * 2**16, "at most 65,536 characters"),
    ],
)
def test_the_error_for_a_wrong_uri_names_the_correct_form(uri: str, problem: str) -> None:
    """The message names the wrong part and shows the correct form."""
    with pytest.raises(ConfigError) as caught:
        parse(uri)
    assert problem.replace("\\", "") in str(caught.value)


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ({"db": 3}, "db", 3),
        ({"db": "3"}, "db", 3),
        ({"db": None}, "db", 1),
        ({"username": "b"}, "username", "b"),
        ({"password": "new /?#@"}, "password", "new /?#@"),
        ({"prefix": "api"}, "prefix", "api"),
        ({"deadline_ms": 20}, "deadline_ns", 20_000_000),
        ({"deadline_ms": 1.3}, "deadline_ns", 1_300_000),
        ({"deadline_ms": "1.3"}, "deadline_ns", 1_300_000),
        ({"connect_ms": 60_000}, "connect_ns", 60_000_000_000),
        ({"tls_ca": Path("/a.pem")}, "tls", TlsOptions(Path("/a.pem"))),
        ({"tls_verify": "none"}, "tls", TlsOptions(verify="none")),
    ],
)
def test_an_argument_overrides_the_uri(option: dict[str, Any], field: str, value: object) -> None:
    """An argument overrides the URI; None keeps the value of the URI."""
    read = parse("rediss://a:pw@localhost/1?prefix=old&deadline_ms=7&connect_ms=7", **option)
    assert getattr(read, field) == value


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"db": True}, "db is not a whole number"),
        ({"db": 1.0}, "db is not a whole number"),
        ({"deadline_ms": float("nan")}, "deadline_ms=nan is not"),
        ({"deadline_ms": float("inf")}, "deadline_ms=inf is not"),
        ({"deadline_ms": 1e300}, "deadline_ms=1e+300 is not"),
        ({"deadline_ms": True}, "deadline_ms=True is not"),
        ({"deadline_ms": -5}, "deadline_ms=-5 is not"),
        ({"password": b"pw"}, "password is not text of at most 65,536 bytes"),
        ({"password": "\ud800"}, "password is not text of at most 65,536 bytes"),
        ({"tls_ca": 5}, "tls_ca is not the path of a file"),
        ({"timeout": 5}, "no option timeout; the options are db"),
    ],
)
def test_the_error_for_a_wrong_argument_names_it(option: dict[str, Any], problem: str) -> None:
    """The message names the argument and the values that it accepts."""
    with pytest.raises(ConfigError) as caught:
        parse("redis://localhost", **option)
    assert problem in str(caught.value)


@pytest.mark.parametrize("uri", [None, 5, b"redis://:pw@localhost", Path("redis://localhost")])
def test_parse_rejects_a_uri_that_is_not_text(uri: Any) -> None:
    """The message does not repeat the value: bytes may contain a password."""
    with pytest.raises(ConfigError, match="a URI must be text, not of type") as caught:
        parse(uri)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "redis://h:{}",
        "redis://h/{}",
        "redis://h?db={}",
        "redis://h?deadline_ms={}",
        "redis://h?deadline_ms=1.{}",
    ],
)
@pytest.mark.parametrize("digits", ["9" * 11, "9" * 60_000, "9" * 10**6])
def test_parse_rejects_long_numbers_without_converting_them(template: str, digits: str) -> None:
    """int() of that many digits would raise ValueError or take seconds."""
    with pytest.raises(ConfigError):
        parse(template.format(digits))


@pytest.mark.parametrize("name", ["db", "deadline_ms", "connect_ms", "prefix", "tls_verify"])
def test_the_error_for_a_long_argument_is_short(name: str) -> None:
    """A huge int or a long text gives a message of one or two lines."""
    for value in (10**5_000, -(10**5_000), "9" * 10**6):
        with pytest.raises(ConfigError) as caught:
            parse("redis://localhost", **{name: value})
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("valkey://localhost", "redis://localhost:6379/0"),
        ("redis://:pw@localhost/2?prefix=a", "redis://:***@localhost:6379/2"),
        ("rediss://a%40b:pw@[::1]:7", "rediss://a%40b:***@[::1]:7/0"),
        ("redis+unix://:pw@/run/it", "redis+unix://:***@/run/it"),
        ("redis+unix:///run/it?db=3", "redis+unix:///run/it?db=3"),
        ("redis+sentinel://s1,s2/a/1", "redis+sentinel://s1:26379,s2:26379/a/1"),
        ("rediss+cluster://a:pw@h1,h2", "rediss+cluster://a:***@h1:6379,h2:6379"),
    ],
)
def test_shown_returns_the_uri_without_secrets(uri: str, shown: str) -> None:
    """The shown form is a valid URI itself."""
    assert parse(uri).shown() == shown
    assert parse(shown).shown() == shown


# Characters that do not occur in a row in our own messages, and characters with a meaning in URIs.
_SECRET = st.text(st.sampled_from("QXZ389_=;:/?#@&%[], \n\té\\*'\""), min_size=8, max_size=24)
_WRONG = st.sampled_from(
    [
        {},
        {"db": "x"},
        {"deadline_ms": 0},
        {"prefix": "{"},
        {"tls_ca": "a"},
        {"tls_verify": "maybe"},
        {"unknown": "x"},
        {"username": "app"},
        {"sentinel_username": "app"},
    ]
)
_PLACES = [
    "redis://:{}@localhost",
    "redis://app:{}@localhost/0",
    "rediss://app:{}@localhost/0?tls_verify=full",
    "redis://app:{}@localhost:port/db",
    "redis://app:{}@",
    "redis://localhost,password={}",
    "redis://localhost?password={}",
    "redis://localhost/0?passwort={}",
    "redis://localhost/0?deadline_ms=20;password={}",
    "redis://localhost#{}",
    "redis+unix://app:{}@/run/redis.sock",
    "redis+sentinel://app:{}@s1,s2/orders?sentinel_password={}",
    "redis+cluster://app:{}@h1:7000,h2:7000",
    "redis:app:{}@localhost",
    "redi://app:{}@localhost",
    "{}",
]


def _said(uri: str, options: dict[str, Any]) -> list[str]:
    """Return every text that a program could print about this URI."""
    try:
        read = parse(uri, **options)
    except ConfigError as error:
        causes = (error.__cause__, error.__context__)
        return [f(each) for each in (error, *causes) for f in (str, repr)]
    return [str(read), repr(read), read.shown(), f"{read}"]


@given(_SECRET, st.sampled_from(_PLACES), st.booleans(), _WRONG)
@example("12/QXQXQXQX", "redis://app:{}@localhost", False, {})
@example("12?QXQXQXQX", "redis://app:{}@localhost", False, {})
@example("12#QXQXQXQX", "redis://app:{}@localhost", False, {})
@example("99999999", "redis://app:{}", False, {})
@example("12/QXQXQXQX", "redis://app:{}", False, {})
def test_no_message_contains_a_password(
    secret: str, place: str, encoded: bool, wrong: dict[str, Any]
) -> None:
    """No message contains the password or a part of it, wherever it stands in the URI."""
    written = quote(secret, safe="") if encoded else secret
    for text in _said(place.replace("{}", written), dict(wrong)):
        parts = (part for part in re.split(r"[/?#@&=;:]", secret) if len(part) > 5)
        for form in (secret, quote(secret, safe=""), repr(secret)[1:-1], *parts):
            assert form not in text


@given(_SECRET, _WRONG)
def test_no_message_contains_a_password_given_as_an_argument(
    secret: str, wrong: dict[str, Any]
) -> None:
    """An argument is secret even if its name is misspelled."""
    for name in ("password", "sentinel_password", "passwrd"):
        for uri in ("redis://localhost", "redis+sentinel://h/a", "redis://:"):
            for text in _said(uri, wrong | {name: secret}):
                assert secret not in text
                assert repr(secret)[1:-1] not in text


_TEXT = st.text(max_size=30)
_PIECES = st.lists(
    st.sampled_from(
        [*"/:@?#&=,%[]", "h", "6379", "0", "::1", "%41", "%ff", "é", "\ud800", *OPTION_NAMES]
    ),
    max_size=12,
).map("".join)
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    _TEXT,
    st.binary(max_size=5),
    st.sampled_from([10**5_000, Path("a\0"), "\ud800", "x" * 10**5, object(), [], {}, 1j]),
)
_OPTIONS = st.dictionaries(
    st.one_of(st.sampled_from(OPTION_NAMES), st.sampled_from(["mode", "ca", "\ud800", ""])),
    _VALUES,
    max_size=3,
)


@given(st.one_of(st.sampled_from(SCHEMES).map(lambda name: f"{name}://"), _TEXT), _PIECES, _OPTIONS)
@example("redis://", "[::1", {})
@example("redis://", "h:²", {})
@example("redis://", "\ufdfa", {})
def test_parse_returns_a_config_or_raises_config_error(
    start: str, rest: str, options: dict[str, Any]
) -> None:
    """Any text and any options give a config or a ConfigError; a config can be shown."""
    with suppress(ConfigError):
        read = parse(start + rest, **options)
        read.shown().encode()
        repr(read).encode()
        assert read.addresses


@given(
    st.text(ascii_letters + "-_/?#@&%é ", max_size=12),
    st.text(min_size=1, max_size=12),
    st.integers(0, 2**31 - 1),
)
def test_percent_encoded_credentials_are_decoded(username: str, password: str, db: int) -> None:
    """User names and passwords may contain any character."""
    assume(password.isascii() or not any("\ud800" <= c <= "\udfff" for c in password))
    user, secret = quote(username, safe=""), quote(password, safe="")
    read = parse(f"redis://{user}:{secret}@localhost/{db}")
    assert (read.username, read.password, read.db) == (username or None, password, db)


def test_parsing_needs_no_redis_library() -> None:
    """A base install without the redis extra can still reject a wrong URI."""
    code = (
        "import sys, importlib.util as u; sys.modules['redis'] = sys.modules['hiredis'] = None;"
        "spec = u.spec_from_file_location('config', sys.argv[1]);"
        "m = sys.modules['config'] = u.module_from_spec(spec); spec.loader.exec_module(m);"
        "print(m.parse('redis://h').shown())"
    )
    command = [sys.executable, "-c", code, str(module.__file__)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "redis://h:6379/0\n"


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate, its key, the same key with a passphrase, and a file that is neither."""
    path = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    names = ("-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost")
    _openssl(path, "req", "-x509", *curve, "-nodes", *names)
    _openssl(path, "ec", "-in", "key.pem", "-aes128", "-passout", "pass:x", "-out", "locked.pem")
    (path / "text.pem").write_text("no certificate")
    return path


@pytest.mark.parametrize(
    ("verify", "mode", "names_host"),
    [
        ("full", ssl.CERT_REQUIRED, True),
        ("ca", ssl.CERT_REQUIRED, False),
        ("none", ssl.CERT_NONE, False),
    ],
)
def test_tls_verify_sets_what_the_context_verifies(
    folder: Path, verify: Verify, mode: ssl.VerifyMode, names_host: bool
) -> None:
    """full verifies authority and name, ca the authority, none nothing; TLS 1.2 is the minimum."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    context = TlsOptions(ca=cert, cert=cert, key=key, verify=verify).context()
    assert context.verify_mode == mode
    assert context.check_hostname is names_host
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.cert_store_stats()["x509"] == 1


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"ca": "gone.pem"}, "gone.pem' cannot be read: No such file"),
        ({"ca": "."}, "cannot be read: Is a directory"),
        ({"ca": "text.pem"}, "text.pem"),
        ({"cert": "gone.pem"}, "gone.pem' cannot be read"),
        ({"cert": "cert.pem", "key": "gone.pem"}, "gone.pem' cannot be read"),
        ({"cert": "cert.pem"}, "a certificate with its key"),
        ({"cert": "cert.pem", "key": "text.pem"}, "a certificate with its key"),
        ({"cert": "cert.pem", "key": "locked.pem"}, "without a passphrase"),
    ],
)
def test_the_error_for_an_unusable_file_names_it(
    folder: Path, files: dict[str, str], problem: str
) -> None:
    """A missing, wrong or encrypted file raises ConfigError at startup, not in a handshake."""
    paths: dict[str, Any] = {name: folder / file for name, file in files.items()}
    with pytest.raises(ConfigError) as caught:
        TlsOptions(**paths).context()
    assert problem in str(caught.value)


def test_tls_trusts_the_system_authorities_by_default() -> None:
    """A server with a public certificate needs no option."""
    assert TlsOptions().context().verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("option", "given", "field", "value"),
    [
        ("denied_cache_ms", "0", "denied_cache_ns", 0),
        ("denied_cache_ms", 0, "denied_cache_ns", 0),
        ("denied_cache_ms", "1.5", "denied_cache_ns", 1_500_000),
        ("denied_cache_ms", 1.5, "denied_cache_ns", 1_500_000),
        ("coalesce", "off", "coalesce", False),
        ("coalesce", "TRUE", "coalesce", True),
        ("coalesce", False, "coalesce", False),
        ("breaker", "false", "breaker", False),
        ("breaker", "on", "breaker", True),
        ("breaker_window_ms", "500", "breaker_window_ns", 500_000_000),
        ("breaker_failures", "9", "breaker_failures", 9),
        ("breaker_failures", 7, "breaker_failures", 7),
        ("breaker_share", "0.25", "breaker_share", 0.25),
        ("breaker_share", 1, "breaker_share", 1.0),
        ("breaker_open_ms", "2.5", "breaker_open_ns", 2_500_000),
        ("breaker_open_max_ms", 60_000, "breaker_open_max_ns", 60 * 10**9),
        ("breaker_probes", "1", "breaker_probes", 1),
    ],
)
def test_an_option_may_be_text_or_an_argument(
    option: str, given: Any, field: str, value: object
) -> None:
    """Text has the form it has in a URI; an argument may also have the option's type."""
    assert getattr(parse("redis://localhost", **{option: given}), field) == value
    if isinstance(given, str):
        assert getattr(parse(f"redis://localhost?{option}={given}"), field) == value


@pytest.mark.parametrize(
    ("option", "given", "problem"),
    [
        ("denied_cache_ms", "-1", "denied_cache_ms='-1' is not 0 or a number of milliseconds"),
        ("denied_cache_ms", False, "denied_cache_ms=False is not"),
        ("coalesce", "maybe", "coalesce='maybe' is not one of on, true, off, false; for"),
        ("coalesce", 1, "coalesce=1 is not one of on"),
        ("breaker", "a=b", "breaker=(not shown) is not one of on"),
        ("breaker_failures", "0", "breaker_failures='0' is not a whole number from 1 to"),
        ("breaker_failures", 10**7, "is not a whole number from 1 to 1,000,000"),
        ("breaker_failures", True, "breaker_failures=True is not"),
        ("breaker_probes", "1.5", "breaker_probes='1.5' is not a whole number"),
        ("breaker_share", "0", "breaker_share='0' is not a number above 0 and up to 1"),
        ("breaker_share", "1.1", "breaker_share='1.1' is not a number above"),
        ("breaker_share", float("nan"), "breaker_share=nan is not a number above"),
        ("breaker_share", True, "breaker_share=True is not a number above"),
        ("breaker_window_ms", "0", "breaker_window_ms='0' is not a number of milliseconds"),
        ("breaker_open_ms", "4000", "breaker_open_ms is more than breaker_open_max_ms"),
        ("breaker_open_max_ms", 99, "breaker_open_ms is more than breaker_open_max_ms"),
    ],
)
def test_the_error_for_a_wrong_option_names_it(option: str, given: Any, problem: str) -> None:
    """The message names the option and shows an example."""
    with pytest.raises(ConfigError) as caught:
        parse("redis://localhost", **{option: given})
    assert problem in str(caught.value)
