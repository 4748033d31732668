"""How the service identifies the requests of a gateway: `--identify`, and the options of tokens.

    --identify user=claim:sub --jwks https://id.example/jwks.json --jwt-algorithm RS256

`claim:NAME` is a claim of the request's bearer token. It is verified with one key or with the keys
of a JWKS, as `web/claims.py` does in an application. `unverified_claim:NAME` is not verified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.service.process.settings import ServiceSettings
from ratekeeper.web.addresses import ForwardedHeader
from ratekeeper.web.claims import Claim, Jwks
from ratekeeper.web.identity import Identity

KEY_BYTES_MAX: Final = 64 * 1024
_CLAIM: Final = "claim:"
_EXAMPLE: Final = (
    "for example --jwks https://id.example/.well-known/jwks.json --jwt-algorithm RS256"
)


def identity_of(settings: ServiceSettings) -> Identity:
    """Return how `/v1/authorize` identifies a request. Reads the keys; raises ConfigError."""
    sources = settings.sources
    claims = [each for several in sources.values() for each in several if each.startswith(_CLAIM)]
    verification = _verification(settings, claims)
    for several in sources.values():
        several[:] = [
            Claim(each.removeprefix(_CLAIM), **verification) if each in claims else each
            for each in several
        ]
    forwarded: ForwardedHeader | None = None if settings.forwarded == "any" else settings.forwarded
    return Identity(sources, trusted_proxies=settings.trusted_proxy, forwarded=forwarded)


def _verification(settings: ServiceSettings, claims: list[str]) -> dict[str, Any]:
    """Return the options of every Claim. Raises ConfigError."""
    given = {
        "--jwt-key": settings.jwt_key,
        "--jwks": settings.jwks,
        "--jwt-algorithm": settings.jwt_algorithm,
        "--jwt-issuer": settings.jwt_issuer,
        "--jwt-audience": settings.jwt_audience,
        "--jwt-leeway": settings.jwt_leeway,
    }
    if not claims:
        unused = [name for name, value in given.items() if value]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} has no effect, because no --identify reads a verified claim; "
                f"for example --identify user=claim:sub"
            )
        return {}
    if bool(settings.jwt_key) == bool(settings.jwks):
        raise ConfigError(
            f"--identify {show(claims[0])} is verified with --jwks or with --jwt-key; {_EXAMPLE}. "
            f"Behind a gateway that verifies tokens, write unverified_{claims[0]}"
        )
    if not settings.jwt_algorithm:
        raise ConfigError(f"tokens need --jwt-algorithm, and only these are accepted; {_EXAMPLE}")
    return {
        "key": Jwks(settings.jwks) if settings.jwks else _key_of(settings.jwt_key),
        "algorithms": list(settings.jwt_algorithm),
        "issuer": list(settings.jwt_issuer) or None,
        "audience": list(settings.jwt_audience) or None,
        "leeway": settings.jwt_leeway,
    }


def _key_of(path: str) -> str:
    """Return a public key (PEM) or a shared secret from a file."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(KEY_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--jwt-key {path} cannot be read: {error}") from None
    if len(text) > KEY_BYTES_MAX:
        raise ConfigError(
            f"--jwt-key {path} has more than {KEY_BYTES_MAX:,} bytes; name a key file"
        )
    # An editor ends a file with a line break, which is not a part of a secret.
    return text.strip()
