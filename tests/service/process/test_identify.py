"""How the service identifies a gateway's requests: verified claims, and the headers of proxies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jwt
import pytest

from ratekeeper import ConfigError
from ratekeeper.service.process.identify import identity_of
from ratekeeper.service.process.settings import ServiceSettings
from ratekeeper.web.requests import AsgiRequest
from tests.service.http.client import http_service
from tests.web.test_claims import RSA_KEY, SECRET, Provider, jwk, pem_of

CLAIMS = {"sub": "ann", "iss": "https://id.example", "aud": "shop"}
TERMS: dict[str, Any] = {
    "identify": ("user=claim:sub",),
    "jwt_issuer": ("https://id.example",),
    "jwt_audience": ("shop", "api"),
}


def user_of(settings: ServiceSettings, token: str) -> str | None:
    """Return the user of a request with this token."""
    headers = [(b"authorization", f"Bearer {token}".encode())]
    return identity_of(settings).request_of(AsgiRequest({"type": "http", "headers": headers})).user


def signed(key: Any = RSA_KEY, algorithm: str = "RS256", **changed: Any) -> str:
    return jwt.encode({**CLAIMS, **changed}, key, algorithm=algorithm, headers={"kid": "1"})


@pytest.mark.parametrize("way", ["jwks URL", "jwks file", "public key", "secret"])
def test_a_claim_is_verified(way: str, tmp_path: Path) -> None:
    """By key, issuer, audience and algorithm; any other token counts as absent."""
    path = tmp_path / "key"
    with Provider(jwk(RSA_KEY)) as provider:
        path.write_bytes(
            {"jwks file": provider.body, "public key": pem_of(RSA_KEY).encode()}.get(
                way, SECRET.encode() + b"\n"
            )
        )
        option = "jwks" if way.startswith("jwks") else "jwt_key"
        given = {option: provider.url if way == "jwks URL" else str(path)}
        key, algorithm = (SECRET, "HS256") if way == "secret" else (RSA_KEY, "RS256")
        settings = ServiceSettings(**TERMS, **given, jwt_algorithm=(algorithm,))
        assert user_of(settings, signed(key, algorithm)) == "ann"
        assert user_of(settings, signed(key, algorithm, aud="api")) == "ann"
        for changed in ({"iss": "https://evil.example"}, {"aud": "other"}, {"exp": 1}):
            assert user_of(settings, signed(key, algorithm, **changed)) is None
        assert user_of(settings, signed("f" * 32, "HS256")) is None
        assert user_of(settings, jwt.encode(CLAIMS, None, algorithm="none")) is None


async def test_a_forged_token_is_limited_as_anonymous(tmp_path: Path) -> None:
    """A client cannot get a new quota with each name that it signs itself."""
    path = tmp_path / "key.pem"
    path.write_text(pem_of(RSA_KEY))
    settings = ServiceSettings(**TERMS, jwt_key=str(path), jwt_algorithm=("RS256",))
    rules = {"version": 1, "rules": [{"id": "a", "by": ["user"], "limits": ["1/hour"]}]}
    async with http_service(rules=rules, identity=identity_of(settings)) as http:
        for name, key, status in (
            ("ann", RSA_KEY, 200), ("ann", RSA_KEY, 429), ("bob", RSA_KEY, 200),
            ("x", "f" * 32, 200), ("y", "f" * 32, 429), ("z", "f" * 32, 429),
        ):  # fmt: skip
            algorithm = "HS256" if isinstance(key, str) else "RS256"
            headers = {
                "X-Original-URI": "/",
                "Authorization": f"Bearer {signed(key, algorithm, sub=name)}",
            }
            assert (await http("GET", "/v1/authorize", b"", headers)).status == status


def test_a_claim_that_is_not_verified_says_so() -> None:
    """The word is in the name of the source."""
    settings = ServiceSettings(identify=("user=unverified_claim:sub",))
    assert user_of(settings, signed("f" * 32, "HS256")) == "ann"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"identify": ("user=claim:sub",)}, r"--jwks or with --jwt-key.*unverified_claim:sub"),
        ({**TERMS, "jwks": "a", "jwt_key": "b"}, "--jwks or with --jwt-key"),
        ({**TERMS, "jwks": "a"}, "--jwt-algorithm"),
        ({**TERMS, "jwks": "missing", "jwt_algorithm": ("RS256",)}, "missing cannot be read"),
        ({**TERMS, "jwt_key": "missing", "jwt_algorithm": ("RS256",)}, "missing cannot be read"),
        ({**TERMS, "jwt_key": __file__, "jwt_algorithm": ("RS256",)}, "not valid for RS256"),
        ({"jwks": "a"}, "--jwks has no effect"),
        ({"jwt_issuer": ("a",), "identify": ("user=unverified_claim:sub",)}, "has no effect"),
        ({"identify": ("user=trusted_header:X-User",)}, "trusted_proxies"),
    ],
)
def test_a_wrong_combination_is_rejected(given: dict[str, Any], message: str) -> None:
    """At startup, and not with the first request."""
    with pytest.raises(ConfigError, match=message):
        identity_of(ServiceSettings(**given))


@pytest.mark.parametrize(
    ("forwarded", "ip"),
    [("any", "10.0.0.1"), ("x-real-ip", "192.0.2.7"), ("x-forwarded-for", "192.0.2.8")],
)
def test_the_header_of_the_proxies_is_a_setting(forwarded: Any, ip: str) -> None:
    """By default, headers that contradict each other are not believed."""
    settings = ServiceSettings(trusted_proxy=("10.0.0.0/8",), forwarded=forwarded)
    headers = [(b"x-real-ip", b"192.0.2.7"), (b"x-forwarded-for", b"192.0.2.8")]
    request = AsgiRequest({"type": "http", "client": ("10.0.0.1", 1), "headers": headers})
    assert identity_of(settings).address_of(request) == ip
    only = AsgiRequest({"type": "http", "client": ("10.0.0.1", 1), "headers": headers[:1]})
    if forwarded != "x-forwarded-for":
        assert identity_of(settings).address_of(only) == "192.0.2.7"
