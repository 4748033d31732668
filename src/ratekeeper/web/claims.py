"""A source of identity: a claim of a JSON Web Token.

A token is verified either here or by a gateway that every request passes. There is no third
choice: a client can write anything into an unverified claim, and could pose as another client with
every request.

A token that is expired, forged or malformed counts as absent: identity tries its next source, and
`rejected` grows by one. Rejecting the request is up to the application.

`Jwks` keeps the public keys of an identity provider in memory. It never fetches them while a
request waits: a thread does, every few minutes, and when a token names a key that is not known yet.
That token counts as absent. If the keys cannot be fetched, the last ones stay in use, and a warning
is logged.

PyJWT verifies (the extra `jwt`). The allowed algorithms are configured and never
read from the token. `none` is not allowed, and a public key cannot be used as a shared secret.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.limiter.arguments import kind_of, name_of
from ratekeeper.web.requests import UNCLEAR, WebRequest, sole_header

# Servers allow headers of about this size. A longer token counts as invalid.
TOKEN_LENGTH_MAX: Final = 8_192
LEEWAY_SECONDS_MAX: Final = 3_600
# How often the keys of a Jwks are read, and how soon again for an unknown key or after a failure.
JWKS_SECONDS: Final = 300
JWKS_RETRY_SECONDS: Final = 10
JWKS_FETCH_SECONDS: Final = 5
JWKS_BYTES_MAX: Final = 1024 * 1024

LOG: Final = logging.getLogger("ratekeeper.web")

_BEARER: Final = "bearer "
_JWKS_EXAMPLE: Final = 'for example Jwks("https://id.example/.well-known/jwks.json")'
_EXAMPLE: Final = 'for example Claim("sub", key=PUBLIC_KEY, algorithms=["RS256"])'

TokenKey = Any
"""A key that verifies tokens: PEM text, a secret, a key object of PyJWT, or a Jwks."""


def bearer_of(value: str | None) -> str | None:
    """Return the token in an Authorization header; None if there is no bearer token.

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

    `key`         a public key as PEM text, a shared secret, a Jwks, or a function that takes the
                  token and returns the key. The function runs on every request, so it must keep the
                  keys in memory. If it has no key for a token, it raises LookupError, ValueError or
                  an error of PyJWT.
    `algorithms`  the allowed algorithms.
    `audience`, `issuer`  the required values of `aud` and `iss`; by default any value is accepted.
    `leeway`      the number of seconds that clocks may differ by.
    `header`      the header that holds the token; by default Authorization.

    Verified by a gateway:

        Claim("sub", unverified=True)

    This decodes the token without verifying it. It is safe only if every request passes a gateway
    that verifies the token and rejects invalid ones, and if no client can reach the application
    directly. Otherwise each client chooses its own identity.
    """

    def __init__(
        self,
        name: str,
        *,
        key: TokenKey | Callable[[str], TokenKey] | None = None,
        algorithms: Sequence[str] = (),
        audience: str | Sequence[str] | None = None,
        issuer: str | Sequence[str] | None = None,
        leeway: float = 0,
        header: str = "authorization",
        unverified: bool = False,
    ) -> None:
        _check_texts(name, header)
        if unverified is not (key is None):
            raise ConfigError(
                "a claim needs key= and algorithms= to be verified here, or unverified=True "
                f"if a gateway has verified it; {_EXAMPLE}"
            )
        self.name = name
        self.label = f"unverified_claim:{name}" if unverified else f"claim:{name}"
        """The name of this source, which is part of a key."""
        self.rejected = 0
        """The number of invalid tokens. It is counted without a lock, so it may be slightly low."""
        self._header = header.lower()
        self._read: Callable[[str], object] = _unverified
        if not unverified:
            self._read = _verifier(key, algorithms, audience, issuer, leeway)
        elif algorithms or audience is not None or issuer is not None:
            raise ConfigError(
                "unverified=True verifies nothing, so algorithms=, audience= and issuer= have "
                f"no effect; to verify the token here, give a key, {_EXAMPLE}"
            )

    def __call__(self, request: WebRequest) -> str | None:
        """Return the claim's value as text; None without a valid token that has the claim."""
        value = sole_header(request, self._header)
        if value == UNCLEAR:
            return value
        token = bearer_of(value)
        if token is None and self._header != "authorization" and value:
            token = value.strip()  # a gateway's header holds the token alone
        return None if token is None else self.of_token(token)

    def of_token(self, token: str) -> str | None:
        """Return the claim of this token; None if the token is invalid or lacks the claim."""
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
        how = "unverified=True" if self._read is _unverified else "verified"
        return f"Claim({self.name!r}, {how})"


class Jwks:
    """The keys of an identity provider (RFC 7517), as the `key` of a Claim.

        Claim("sub", key=Jwks("https://id.example/jwks.json"), algorithms=["RS256"])

    `source`  an https URL, an http URL on this machine, or a file.

    The keys are read here. A file that cannot be read raises ConfigError. A URL that cannot be
    reached is logged and tried again, so that an application can start without its provider; until
    then, every token counts as absent.
    """

    def __init__(self, source: str, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        _require_jwt()
        self._source = source
        self._read = _reader_of(source)
        self._monotonic_s = monotonic_s
        # By key id: the algorithm that the key is for (None: any), and the key.
        self._keys: dict[str | None, tuple[str | None, TokenKey]] = {}
        self._thread: threading.Thread | None = None
        self._refreshed_s = self._tried_s = monotonic_s()
        try:
            self._keys = _keys_of(self._read())
        except (OSError, ValueError) as error:
            if "://" not in source:
                raise ConfigError(f"the keys in {source} cannot be read: {error}") from None
            self._refreshed_s = -math.inf
            _log_failure(source, error)

    def __call__(self, token: str) -> TokenKey:
        """Return the key of a token. Raises LookupError if it is not known. Never waits."""
        import jwt  # noqa: PLC0415 - only verification needs it

        header = jwt.get_unverified_header(token)
        name = header.get("kid")
        if name is None and len(self._keys) == 1:
            [found] = self._keys.values()
        else:
            found = self._keys.get(name)  # type: ignore[assignment]  # None is checked below
        now_s = self._monotonic_s()
        is_due = found is None or now_s - self._refreshed_s >= JWKS_SECONDS
        if is_due and now_s - self._tried_s >= JWKS_RETRY_SECONDS:
            self._start_refresh(now_s)
        if found is None or found[0] not in {None, header.get("alg")}:
            raise LookupError(f"there is no key {show(name)} in {self._source}")
        return found[1]

    def _start_refresh(self, now_s: float) -> None:
        # After a fork, the thread of the parent process is not alive in the child.
        if self._thread is None or not self._thread.is_alive():
            self._tried_s = now_s
            self._thread = threading.Thread(target=self._refresh, args=(now_s,), daemon=True)
            self._thread.start()

    def _refresh(self, now_s: float) -> None:
        try:
            self._keys = _keys_of(self._read())
            self._refreshed_s = now_s
        except (OSError, ValueError) as error:
            _log_failure(self._source, error)


def _log_failure(source: str, error: Exception) -> None:
    LOG.warning("the keys of tokens cannot be read from %s: %s", source, error)


def _reader_of(source: str) -> Callable[[], bytes]:
    """Return a function that reads the keys; it raises OSError or ValueError."""
    if not isinstance(source, str) or not source:
        raise ConfigError(f"{show(source)} is not a file or a URL; {_JWKS_EXAMPLE}")
    if "://" not in source:
        return partial(_read_file, Path(source))
    parts = urlsplit(source)
    is_local = parts.hostname in {"127.0.0.1", "::1", "localhost"}
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and is_local)):
        raise ConfigError(
            f"{show(source)} is not an https URL; over http, anyone on the way could replace the "
            f"keys; {_JWKS_EXAMPLE}"
        )
    return partial(_fetch, source)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(JWKS_BYTES_MAX + 1)


class _NoRedirects(HTTPRedirectHandler):
    """Rejects redirects, which could lead to another host or to http."""

    def redirect_request(self, *args: Any) -> None:
        """Return None, so that urllib raises HTTPError."""


def _fetch(url: str) -> bytes:
    # The scheme was checked: only https, or http on this machine.
    with build_opener(_NoRedirects).open(url, timeout=JWKS_FETCH_SECONDS) as reply:
        body: bytes = reply.read(JWKS_BYTES_MAX + 1)
        return body


def _keys_of(body: bytes) -> dict[str | None, tuple[str | None, TokenKey]]:
    """Parse a JWKS. Raises ValueError. Keys of unknown kinds and for encryption are left out."""
    import jwt  # noqa: PLC0415 - only verification needs it

    if len(body) > JWKS_BYTES_MAX:
        raise ValueError(f"it has more than {JWKS_BYTES_MAX:,} bytes")
    try:
        listed = list(json.loads(body)["keys"])
    except (KeyError, TypeError):
        raise ValueError('it is not a JWKS: {"keys": […]}') from None
    found: dict[str | None, tuple[str | None, TokenKey]] = {}
    for each in listed:
        try:
            key = jwt.PyJWK(each).key
        except (jwt.PyJWTError, AttributeError, KeyError, TypeError, ValueError):
            continue
        if each.get("use", "sig") == "sig":
            found[each.get("kid")] = each.get("alg"), key
    if not found:
        raise ValueError("it has no key that can verify a signature")
    return found


def _check_texts(name: object, header: object) -> None:
    for what, value in (("the name of a claim", name), ("header", header)):
        if not isinstance(value, str) or not value or not value.isprintable():
            raise ConfigError(f"{what} must be printable text, not {show(value)}; {_EXAMPLE}")


def _unverified(token: str) -> object:
    """Decode the claims of a token without verifying its signature."""
    parts = token.split(".", 3)
    if len(parts) != 3:
        return None
    payload = parts[1]
    return json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))


def _verifier(
    key: TokenKey,
    algorithms: Sequence[str],
    audience: str | Sequence[str] | None,
    issuer: str | Sequence[str] | None,
    leeway: float,
) -> Callable[[str], object]:
    """Return a function from a token to its claims; it returns None for an invalid token."""
    jwt = _require_jwt()
    allowed = _algorithms(algorithms, set(jwt.algorithms.get_default_algorithms()))
    _check_terms(audience, issuer, leeway)
    _check_key(key)
    prepared = key
    if not callable(key):
        try:
            # Parsed once: parsing PEM takes longer than verifying a token.
            prepared = jwt.get_algorithm_by_name(allowed[0]).prepare_key(key)
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the key is not valid for {allowed[0]}: {error}; {_EXAMPLE}"
            ) from None

    def claims_of(token: str) -> object:
        try:
            return jwt.decode(
                token,
                prepared(token) if callable(key) else prepared,
                algorithms=allowed,
                audience=audience,
                issuer=issuer,
                leeway=leeway,
                # A numeric `sub` is accepted; `aud` is checked only if an audience is configured.
                options={"verify_aud": audience is not None, "verify_sub": False},
            )
        except jwt.PyJWTError:
            return None

    return claims_of


def _require_jwt() -> Any:
    try:
        import jwt  # noqa: PLC0415 - only verification needs it
    except ImportError:
        raise ConfigError("verifying tokens needs PyJWT: pip install 'ratekeeper[jwt]'") from None
    return jwt


def _check_key(key: TokenKey) -> None:
    if isinstance(key, str | bytes) and not key.strip():
        # For example from an unset variable. Some versions of PyJWT accept an empty key.
        raise ConfigError(f"the key is empty, so anyone could sign with it; {_EXAMPLE}")
    if callable(key) and kind_of(key) != "plain":
        raise ConfigError(
            f"key={name_of(key)} is async, but the key function is not awaited; write a plain "
            f"function that keeps the keys in memory"
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
            f"algorithms={show(algorithms)} is not a list of known algorithms; "
            f"choose from {', '.join(sorted(known))}"
        )
    if len({each.startswith("HS") for each in wanted}) > 1:
        raise ConfigError(
            f"algorithms={show(algorithms)} mixes shared secrets (HS…) and public keys: anyone who "
            f"has the public key could sign with it; choose one kind"
        )
    return wanted
