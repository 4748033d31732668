"""Who a bearer token says its owner is: a claim of a JSON Web Token.

A token is either verified here, or it was verified by the gateway that everything comes through.
There is no third way: a claim that nobody has verified is whatever the client likes, and each of
its requests could be somebody else's.

A token that is expired, forged or not a token at all is as good as none: the next source of
identity is asked, and `rejected` counts one more. Refusing it is for the application to do.

PyJWT verifies (`pip install 'tollkeeper[jwt]'`). Which algorithms are allowed is said at the start
and never read from the token; `none` is not among them, and a key that is for signatures cannot be
used as a shared secret.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Callable, Sequence
from typing import Any, Final

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.limiter.arguments import kind_of, name_of
from tollkeeper.web.calls import UNCLEAR, Call, sole_header

# Servers allow headers of about this size; a token with more is none of ours.
TOKEN_LENGTH_MAX: Final = 8_192
LEEWAY_SECONDS_MAX: Final = 3_600

_BEARER: Final = "bearer "
_EXAMPLE: Final = 'for example Claim("sub", key=PUBLIC_KEY, algorithms=["RS256"])'

# What a secret, a PEM text or a key object can be; or a function from a token to one of these.
Key = Any


def bearer_of(value: str | None) -> str | None:
    """The token in the value of an Authorization header; None if it holds none.

    >>> bearer_of("Bearer abc"), bearer_of("Basic abc")
    ('abc', None)
    """
    if value is None or value[: len(_BEARER)].lower() != _BEARER:
        return None
    return value[len(_BEARER) :].strip() or None


class Claim:
    """A claim of the request's bearer token, as a source of identity.

    Verified here:

        Claim("sub", key=PUBLIC_KEY, algorithms=["RS256"], audience="shop", issuer="https://id")

    `key`         a public key as PEM text, a shared secret, or a function that is given the token
                  and returns the key, such as one that looks it up in a JWKS. It runs on every
                  request, so it has to have the keys at hand; for a token whose key it does not
                  have it raises LookupError, ValueError or an error of PyJWT.
    `algorithms`  those that are allowed.
    `audience`, `issuer`  what the token has to say there; by default they are not looked at.
    `leeway`      seconds that clocks may differ by.
    `header`      where the token is, if not in Authorization.

    Verified before:

        Claim("sub", trusted_gateway=True)

    This decodes the token and verifies nothing. It is safe only where every request comes through
    a gateway that verifies the token and refuses it otherwise, and where nobody can reach the
    application past the gateway. Anywhere else each client chooses who it is.
    """

    def __init__(
        self,
        name: str,
        *,
        key: Key | Callable[[str], Key] | None = None,
        algorithms: Sequence[str] = (),
        audience: str | Sequence[str] | None = None,
        issuer: str | Sequence[str] | None = None,
        leeway: float = 0,
        header: str = "authorization",
        trusted_gateway: bool = False,
    ) -> None:
        _check_texts(name, header)
        if trusted_gateway is not (key is None):
            raise ConfigError(
                "a claim is verified with a key, or was by a gateway: give key= and algorithms=, "
                f"or trusted_gateway=True; {_EXAMPLE}"
            )
        self.name = name
        self.rejected = 0
        """Tokens that were there and no good. Counted without a lock: about right."""
        self._header = header.lower()
        self._read: Callable[[str], object] = _unverified
        if not trusted_gateway:
            self._read = _verifier(key, algorithms, audience, issuer, leeway)
        elif algorithms or audience is not None or issuer is not None:
            raise ConfigError(
                "with trusted_gateway=True nothing is verified, so algorithms=, audience= and "
                f"issuer= would do nothing; give a key too, {_EXAMPLE}"
            )

    def __call__(self, call: Call) -> str | None:
        """The claim's value as text; None without a token that is good and has it."""
        value = sole_header(call, self._header)
        if value == UNCLEAR:
            return value
        token = bearer_of(value)
        if token is None and self._header != "authorization" and value:
            token = value.strip()  # headers of gateways hold the token alone
        return None if token is None else self.of_token(token)

    def of_token(self, token: str) -> str | None:
        """The claim of this token; None if the token is no good or does not have it."""
        try:
            claims = self._read(token) if len(token) <= TOKEN_LENGTH_MAX else None
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            claims = None
        if not isinstance(claims, dict):
            self.rejected += 1
            return None
        value = claims.get(self.name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return value if isinstance(value, str) else None

    def __repr__(self) -> str:
        how = "trusted_gateway=True" if self._read is _unverified else "verified"
        return f"Claim({self.name!r}, {how})"


def _check_texts(name: object, header: object) -> None:
    for what, value in (("the name of a claim", name), ("header", header)):
        if not isinstance(value, str) or not value or not value.isprintable():
            raise ConfigError(f"{what} is not {show(value)} but printable text; {_EXAMPLE}")


def _unverified(token: str) -> object:
    """What a token says, whoever signed it."""
    parts = token.split(".", 3)
    if len(parts) != 3:
        return None
    payload = parts[1]
    return json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))


def _verifier(
    key: Key,
    algorithms: Sequence[str],
    audience: str | Sequence[str] | None,
    issuer: str | Sequence[str] | None,
    leeway: float,
) -> Callable[[str], object]:
    """A function from a token to its claims; None for one that is no good."""
    try:
        import jwt  # noqa: PLC0415 - only those who verify need it
    except ImportError:
        raise ConfigError(
            "PyJWT, which verifies tokens, is not installed: pip install 'tollkeeper[jwt]'"
        ) from None
    allowed = _algorithms(algorithms, set(jwt.algorithms.get_default_algorithms()))
    _check_terms(audience, issuer, leeway)
    _check_key(key)
    prepared = key
    if not callable(key):
        try:
            # Once, and not for every token: reading PEM takes longer than verifying does.
            prepared = jwt.get_algorithm_by_name(allowed[0]).prepare_key(key)
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise ConfigError(f"the key is none for {allowed[0]}: {error}; {_EXAMPLE}") from None

    def claims_of(token: str) -> object:
        try:
            return jwt.decode(
                token,
                prepared(token) if callable(key) else prepared,
                algorithms=allowed,
                audience=audience,
                issuer=issuer,
                leeway=leeway,
                # A `sub` that is a number is one to us; `aud` counts where one was named.
                options={"verify_aud": audience is not None, "verify_sub": False},
            )
        except jwt.PyJWTError:
            return None

    return claims_of


def _check_key(key: Key) -> None:
    if isinstance(key, str | bytes) and not key.strip():
        # As from a variable that is not set. Anybody can sign with it, and not every PyJWT minds.
        raise ConfigError(f"the key is empty, so that anybody could sign with it; {_EXAMPLE}")
    if callable(key) and kind_of(key) != "plain":
        raise ConfigError(
            f"key={name_of(key)} is async, and a key is asked for without waiting; write a plain "
            f"function that has the keys at hand"
        )


def _check_terms(audience: object, issuer: object, leeway: object) -> None:
    for what, value in (("audience", audience), ("issuer", issuer)):
        several = value if isinstance(value, list | tuple) else (value,)
        if value is not None and not all(isinstance(each, str) and each for each in several):
            raise ConfigError(
                f'{what}={show(value)} is not text or a list of texts; for example {what}="shop"'
            )
    if isinstance(leeway, bool) or not isinstance(leeway, int | float):
        raise ConfigError(f"leeway={show(leeway)} is not a number of seconds; try leeway=30")
    if not 0 <= leeway <= LEEWAY_SECONDS_MAX:
        raise ConfigError(f"leeway={show(leeway)} is not from 0 to {LEEWAY_SECONDS_MAX} seconds")


def _algorithms(algorithms: Sequence[str], known: set[str]) -> list[str]:
    known.discard("none")
    wanted = list(algorithms) if isinstance(algorithms, list | tuple) else []
    unknown = [each for each in wanted if not isinstance(each, str) or each not in known]
    if not wanted or unknown:
        raise ConfigError(
            f"algorithms={show(algorithms)} is not a list of known ones; "
            f"choose from {', '.join(sorted(known))}"
        )
    if len({each.startswith("HS") for each in wanted}) > 1:
        raise ConfigError(
            f"algorithms={show(algorithms)} mixes secrets (HS…) with signatures: whoever has the "
            f"public key could sign with it; name one kind"
        )
    return wanted
