"""Claims of bearer tokens: verified here or by a gateway; other tokens count as absent."""

from __future__ import annotations

import base64
import builtins
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import example, given
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from ratekeeper import ConfigError
from ratekeeper.web.claims import TOKEN_LENGTH_MAX, Claim, Jwks, bearer_of
from ratekeeper.web.requests import AsgiRequest, WebRequest
from tests.redis_servers.waiting import until
from tests.test_fuzz_entries import ANYTHING

SECRET = "s" * 32
RSA_KEY = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def pem_of(key: Any) -> str:
    """Return the public key as text."""
    return str(
        key.public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


def web_request(
    token: str, header: bytes = b"authorization", scheme: str = "Bearer "
) -> WebRequest:
    """Return a request with this token."""
    return AsgiRequest({"type": "http", "headers": [(header, (scheme + token).encode("latin-1"))]})


def token_of(claims: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256") -> str:
    """Return a signed token."""
    return jwt.encode(claims, key, algorithm=algorithm)


def by_secret(name: str = "sub", **more: Any) -> Claim:
    """Return a claim that is verified with the shared secret."""
    return Claim(name, key=SECRET, algorithms=["HS256"], **more)


# ------------------------------------------------------------------------------------ verified


@pytest.mark.parametrize(
    ("key", "public", "algorithm"),
    [
        (SECRET, SECRET, "HS256"),
        (SECRET, SECRET.encode(), "HS256"),
        (RSA_KEY, pem_of(RSA_KEY), "RS256"),
        (RSA_KEY, pem_of(RSA_KEY).encode(), "PS256"),
        (EC_KEY, pem_of(EC_KEY), "ES256"),
        (EC_KEY, EC_KEY.public_key(), "ES256"),
    ],
)
def test_a_valid_token_identifies_the_client(key: Any, public: Any, algorithm: str) -> None:
    """The key may be a shared secret, or a public key as text or as an object."""
    claim = Claim("sub", key=public, algorithms=[algorithm])
    assert claim(web_request(token_of({"sub": "42"}, key, algorithm))) == "42"
    assert claim.rejected == 0


def test_a_key_may_be_looked_up() -> None:
    """A function finds it by the token's header, as in a JWKS. A missing key is not an error."""
    keys = {"one": SECRET, "two": "t" * 32}

    def key_of(token: str) -> str:
        return keys[jwt.get_unverified_header(token)["kid"]]

    claim = Claim("sub", key=key_of, algorithms=["HS256"])
    for kid, key in keys.items():
        token = jwt.encode({"sub": kid}, key, algorithm="HS256", headers={"kid": kid})
        assert claim(web_request(token)) == kid
    stranger = jwt.encode({"sub": "x"}, SECRET, algorithm="HS256", headers={"kid": "three"})
    assert claim(web_request(stranger)) is None
    assert claim(web_request("not.a.token")) is None
    assert claim.rejected == 2


def test_a_jwk_is_a_key_too() -> None:
    """PyJWT's own JWKS client returns such keys."""
    jwk = jwt.PyJWK.from_dict(
        json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA_KEY.public_key())) | {"alg": "RS256"}
    )
    claim = Claim("sub", key=lambda token: jwk, algorithms=["RS256"])
    assert claim(web_request(token_of({"sub": "42"}, RSA_KEY, "RS256"))) == "42"


def unsigned(claims: dict[str, Any], algorithm: str = "none") -> str:
    """Return a token whose header says that it needs no signature."""
    parts = ({"alg": algorithm, "typ": "JWT"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode() for each in parts]
    return ".".join(each.rstrip("=") for each in encoded) + "."


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(token_of({"sub": "42"}, "other" * 10), id="another key"),
        pytest.param(token_of({"sub": "42"}, "s" * 64, "HS512"), id="another algorithm"),
        pytest.param(unsigned({"sub": "42"}), id="none"),
        pytest.param(unsigned({"sub": "42"}, "None"), id="None"),
        pytest.param(unsigned({"sub": "42"}, "HS256"), id="no signature"),
        pytest.param(token_of({"sub": "42", "exp": 1}), id="expired"),
        pytest.param(token_of({"sub": "42", "nbf": 2**40}), id="not yet"),
        pytest.param(token_of({"sub": "42"})[:-4], id="cut"),
        pytest.param(token_of({"sub": "42"}) + "x" * TOKEN_LENGTH_MAX, id="too long"),
        pytest.param(token_of({"sub": "x" * TOKEN_LENGTH_MAX}), id="valid but too long"),
        pytest.param("x", id="no token"),
        pytest.param("a.b.c", id="nearly a token"),
        pytest.param("\xff.\xff.\xff", id="bytes"),
    ],
)
def test_an_invalid_token_counts_as_absent(token: str) -> None:
    """It is counted as rejected and raises no error."""
    claim = by_secret()
    assert claim(web_request(token)) is None
    assert claim.rejected == 1


def test_a_public_key_is_not_accepted_as_a_secret() -> None:
    """A token signed with the public key as a shared secret is rejected."""
    pem = pem_of(RSA_KEY)
    claim = Claim("sub", key=pem, algorithms=["RS256"])
    header = base64.urlsafe_b64encode(b'{"alg":"HS256"}').decode().rstrip("=")
    assert claim(web_request(f"{header}.e30.AAAA")) is None
    with pytest.raises(ConfigError, match="not valid for HS256"):
        Claim("sub", key=pem, algorithms=["HS256"])


@pytest.mark.parametrize(
    ("options", "claims", "good"),
    [
        ({"audience": "shop"}, {"aud": "shop"}, True),
        ({"audience": "shop"}, {"aud": ["shop", "bank"]}, True),
        ({"audience": ["shop", "cafe"]}, {"aud": "cafe"}, True),
        ({"audience": "shop"}, {"aud": "bank"}, False),
        ({"audience": "shop"}, {}, False),
        ({}, {"aud": "bank"}, True),
        ({"issuer": "https://id"}, {"iss": "https://id"}, True),
        ({"issuer": ("https://a", "https://id")}, {"iss": "https://id"}, True),
        ({"issuer": "https://id"}, {"iss": "https://other"}, False),
        ({"issuer": "https://id"}, {}, False),
        # An hour, because the suite may run this test long after it imported this file.
        ({"leeway": 3600}, {"exp": int(time.time()) - 30}, True),
        ({"leeway": 10}, {"exp": int(time.time()) - 30}, False),
    ],
)
def test_audience_issuer_and_leeway_are_checked(
    options: Any, claims: dict[str, Any], good: bool
) -> None:
    """Only the configured conditions are checked."""
    found = by_secret(**options)(web_request(token_of({"sub": "42", **claims})))
    assert found == ("42" if good else None)


# ------------------------------------------------------------------------------------ gateways


def test_behind_a_gateway_nothing_is_verified() -> None:
    """The gateway has verified the token, so signature, time and audience are ignored."""
    claim = Claim("sub", unverified=True)
    for token in (token_of({"sub": "42", "exp": 1, "aud": "x"}, "k" * 40), unsigned({"sub": "42"})):
        assert claim(web_request(token)) == "42"


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "a.b",
        "a.b.c",
        "a.b.c.d",
        "a.W10.c",
        "a.bnVsbA.c",
        "a.\xff.c",
        "a." + "W1tb" * 2000 + ".c",
    ],
)
def test_malformed_tokens_count_as_absent(token: str) -> None:
    """Examples are plain text, JSON that is not an object, and deeply nested JSON."""
    claim = Claim("sub", unverified=True)
    assert claim(web_request(token)) is None
    assert claim.rejected == 1


# ------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("value", "found"),
    [("42", "42"), (42, "42"), (True, None), (1.5, None), (None, None), (["a"], None), ({}, None)],
)
def test_a_claim_is_text_or_a_number(value: Any, found: str | None) -> None:
    """Any other value counts as absent; the token is still valid."""
    for claim in (by_secret("tenant"), Claim("tenant", unverified=True)):
        assert claim(web_request(token_of({"tenant": value}))) == found
        assert claim(web_request(token_of({}))) is None
        assert claim.rejected == 0


def test_a_subject_may_be_a_number() -> None:
    """PyJWT alone would reject it."""
    token = token_of({"tenant": 7})
    assert by_secret("tenant")(web_request(token)) == "7"
    numbered = jwt.api_jws.encode(b'{"sub": 7}', SECRET, algorithm="HS256")
    assert by_secret()(web_request(numbered)) == "7"


@pytest.mark.parametrize(
    ("value", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("BEARER a b", "a b"),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic abc", None),
        ("abc", None),
        ("", None),
        (None, None),
    ],
)
def test_the_token_follows_the_word_bearer(value: str | None, token: str | None) -> None:
    """The word may be in upper or lower case."""
    assert bearer_of(value) == token


def test_other_headers_may_hold_the_token_alone() -> None:
    """The word Bearer is optional there."""
    claim = by_secret(header="X-Assertion")
    token = token_of({"sub": "42"})
    assert claim(web_request(token, b"x-assertion", "")) == "42"
    assert claim(web_request(token, b"x-assertion")) == "42"
    assert claim(web_request(token)) is None
    assert claim.rejected == 0


# ------------------------------------------------------------------------------------ refused


async def key_that_is_awaited(token: str) -> str:
    return SECRET


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "unverified=True"),
        (
            {"key": SECRET, "algorithms": ["HS256"], "unverified": True},
            "if a gateway has verified it",
        ),
        ({"unverified": True, "algorithms": ["HS256"]}, "no effect"),
        ({"unverified": True, "audience": "x"}, "no effect"),
        ({"key": SECRET}, "choose from"),
        ({"key": SECRET, "algorithms": "HS256"}, "choose from"),
        ({"key": SECRET, "algorithms": ["none"]}, "choose from"),
        ({"key": SECRET, "algorithms": ["HS256", "rot13"]}, "choose from"),
        ({"key": SECRET, "algorithms": [7]}, "choose from"),
        ({"key": SECRET, "algorithms": ["HS256", "RS256"]}, "mixes"),
        ({"key": "no PEM", "algorithms": ["RS256"]}, "not valid for RS256"),
        ({"key": 7, "algorithms": ["HS256"]}, "not valid for HS256"),
        ({"key": "", "algorithms": ["HS256"]}, "the key is empty"),
        ({"key": b" \n", "algorithms": ["HS256"]}, "the key is empty"),
        ({"key": key_that_is_awaited, "algorithms": ["HS256"]}, "is async"),
        ({"key": SECRET, "algorithms": ["HS256"], "leeway": -1}, "from 0 to 3600"),
        ({"key": SECRET, "algorithms": ["HS256"], "leeway": "1"}, "number of seconds"),
        ({"key": SECRET, "algorithms": ["HS256"], "audience": 7}, "audience=7"),
        ({"key": SECRET, "algorithms": ["HS256"], "issuer": [7]}, "issuer="),
        ({"unverified": True, "header": ""}, "printable text"),
    ],
)
def test_wrong_settings_are_rejected(options: dict[str, Any], said: str) -> None:
    """The error comes at the start and suggests a correct setting."""
    with pytest.raises(ConfigError, match=said):
        Claim("sub", **options)


@pytest.mark.parametrize("name", ["", 7, None, "a\nb"])
def test_a_claim_needs_a_printable_name(name: Any) -> None:
    """Other names are rejected at the start."""
    with pytest.raises(ConfigError, match="name of a claim"):
        Claim(name, unverified=True)


def test_without_pyjwt_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification needs PyJWT; a trusted gateway does not."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "jwt":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"ratekeeper\[jwt\]"):
        by_secret()
    assert Claim("sub", unverified=True)(web_request("a.eyJzdWIiOiI3In0.c")) == "7"


def test_the_repr_of_a_claim_has_no_key() -> None:
    """It shows the name and whether the claim is verified."""
    assert repr(by_secret()) == "Claim('sub', verified)"
    assert repr(Claim("sub", unverified=True)) == "Claim('sub', unverified=True)"


# ------------------------------------------------------------------------------------ anything


@given(
    st.text(alphabet=st.characters(max_codepoint=255))
    | st.lists(st.binary()).map(
        lambda parts: ".".join(base64.urlsafe_b64encode(part).decode() for part in parts)
    )
)
@example("eyJhbGciOiJIUzI1NiIsImNyaXQiOlsieCJdfQ.e30.")
@example(base64.urlsafe_b64encode(b"[" * 5000).decode() + ".e30.x")
def test_any_token_gives_a_value_or_none(token: str) -> None:
    """No token raises an error."""
    for claim in (by_secret(), Claim("sub", unverified=True)):
        found = claim(web_request(token))
        assert found is None or isinstance(found, str)


@given(
    st.dictionaries(st.sampled_from(["sub", "exp", "nbf", "iat", "aud", "iss", "jti"]), ANYTHING)
)
def test_any_claims_of_a_valid_token_are_accepted(claims: dict[str, Any]) -> None:
    """Whatever the issuer signs gives a value or None."""
    try:
        payload = json.dumps(claims).encode()
    except (TypeError, ValueError):
        return  # no token can contain this
    token = jwt.api_jws.encode(payload, SECRET, algorithm="HS256")
    for claim in (by_secret(audience="a", issuer="b"), by_secret()):
        found = claim.of_token(token)
        assert found is None or isinstance(found, str)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_any_settings_give_a_claim_or_an_error(
    name: Any, key: Any, algorithms: Any, leeway: Any
) -> None:
    """The error is a ConfigError."""
    with suppress(ConfigError):
        Claim(name, unverified=True)
    with suppress(ConfigError):
        Claim("sub", key=key, algorithms=algorithms)
    with suppress(ConfigError):
        Claim("sub", key=SECRET, algorithms=["HS256"], leeway=leeway)
    with suppress(ConfigError):
        by_secret(audience=name, issuer=key)


# ------------------------------------------------------------------------------------ JWKS


class Provider(ThreadingHTTPServer):
    """An identity provider on loopback that serves its keys."""

    daemon_threads = True

    def __init__(self, *keys: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.body = json.dumps({"keys": keys}).encode()
        self.asked = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/jwks.json"

    def __enter__(self) -> Self:
        self._serving = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._serving.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()
        self._serving.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(self.server.status)
        self.send_header("location", "/elsewhere")
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
        """Log nothing."""


def jwk(key: Any, kid: str | None = "1", **more: Any) -> dict[str, Any]:
    """Return the public part of a key as a JWK."""
    algorithm = ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else RSAAlgorithm
    found: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)  # type: ignore[arg-type]  # a key of its kind
    return {**found, **({} if kid is None else {"kid": kid}), **more}


def signed(key: Any = RSA_KEY, kid: str | None = "1", algorithm: str = "RS256") -> WebRequest:
    """Return a request with a token of user 7."""
    headers = None if kid is None else {"kid": kid}
    return web_request(jwt.encode({"sub": "7"}, key, algorithm=algorithm, headers=headers))


def claim_of(source: str, clock: Callable[[], float] = time.monotonic) -> Claim:
    return Claim("sub", key=Jwks(source, monotonic_s=clock), algorithms=["RS256", "RS512", "ES256"])


@pytest.mark.parametrize("is_file", [True, False])
def test_a_jwks_verifies_tokens_by_their_key_id(is_file: bool, tmp_path: Path) -> None:
    """From a file or a URL. A key is only for its own algorithm and for signatures."""
    other = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    keys = [
        jwk(RSA_KEY), jwk(EC_KEY, "2"), jwk(other, "enc", use="enc"),
        jwk(other, "alg", alg="RS512"), {"kty": "unknown", "kid": "9"}, {}, "x",
    ]  # fmt: skip
    with Provider(*keys) as provider:  # type: ignore[arg-type]  # some are invalid
        path = tmp_path / "jwks.json"
        path.write_bytes(provider.body)
        claim = claim_of(str(path) if is_file else provider.url)
        assert claim(signed()) == claim(signed(EC_KEY, "2", "ES256")) == "7"
        assert claim(signed(other, "alg", "RS512")) == "7"
        for forged in (
            signed(other), signed(RSA_KEY, "2"), signed(other, "enc"), signed(other, "alg"),
            signed(kid=None), signed(kid="unknown"), web_request("x.y.z"),
        ):  # fmt: skip
            assert claim(forged) is None
        assert provider.asked == (0 if is_file else 1)


def test_a_token_without_a_key_id_is_verified_with_the_only_key() -> None:
    """With several keys, it counts as invalid."""
    with Provider(jwk(RSA_KEY, None)) as provider:
        assert claim_of(provider.url)(signed(kid=None)) == "7"


def test_new_keys_are_fetched_in_the_background() -> None:
    """For an unknown key at most every 10 seconds, otherwise every 5 minutes; none are lost."""
    now_s = [0.0]
    other = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    with Provider(jwk(RSA_KEY)) as provider:
        claim = claim_of(provider.url, lambda: now_s[0])
        provider.body = json.dumps({"keys": [jwk(RSA_KEY), jwk(other, "2")]}).encode()
        for _ in range(5):
            assert claim(signed(other, "2")) is None
        assert provider.asked == 1
        now_s[0] = 10.0
        until(lambda: claim(signed(other, "2")) == "7", "the new key is used", 20)
        assert provider.asked == 2
        now_s[0] = 309.0
        assert claim(signed()) == "7"
        provider.status = 503
        now_s[0] = 310.0
        assert claim(signed()) == "7"
        until(lambda: provider.asked == 3, "the keys are fetched again", 20)
        for _ in range(5):
            assert claim(signed()) == "7"
        assert provider.asked == 3


def test_an_application_starts_without_its_provider(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens count as absent until the keys are there, which is logged."""
    now_s = [0.0]
    with Provider(jwk(RSA_KEY)) as provider:
        provider.status = 302  # a redirect is not followed
        claim = claim_of(provider.url, lambda: now_s[0])
        assert claim(signed()) is None
        assert "the keys of tokens cannot be read" in caplog.text
        provider.status = 200
        now_s[0] = 10.0
        until(lambda: claim(signed()) == "7", "the keys are used", 20)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://id.example/jwks.json", "not an https URL"),
        ("ftp://id.example/jwks.json", "not an https URL"),
        ("https://", "not an https URL"),
        ("", "not a file or a URL"),
        (7, "not a file or a URL"),
        ("missing.json", "cannot be read"),
    ],
)
def test_an_invalid_source_of_keys_is_rejected(source: Any, message: str) -> None:
    """Over http, anyone on the way could replace the keys."""
    with pytest.raises(ConfigError, match=message):
        Jwks(source)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "not a JWKS"), ("{", "Expecting"), ('{"keys": []}', "no key"), ("7", "not a JWKS"),
     ('{"keys": [{"kty": "oct"}, 7]}', "no key"), (" " * (2**20 + 1), "more than")],
)  # fmt: skip
def test_a_file_without_keys_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    """The error says what is wrong with the file."""
    path = tmp_path / "jwks.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Jwks(str(path))
