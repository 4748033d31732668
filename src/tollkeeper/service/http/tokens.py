"""Who may ask the service for what.

A token has a role. `check` may spend and look at quotas, `read` may look at quotas and at what the
administrators see, `admin` may do everything. A token may be confined to a scope: then the field of
each request must have the scope's value, and gets it where the request says nothing.

Without a token file, whoever reaches the service may check: `tollkeeper serve` sees to it that this
is only the machine itself. Nobody administers without a token, ever.

The file is looked at once a second at most. One that has gone or cannot be read any more opens
nothing: the tokens that were read last stay.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import REQUEST_FIELDS, Request
from tollkeeper.service.http import token_file
from tollkeeper.service.http.clients import counted_address
from tollkeeper.service.http.token_file import Role, Token

__all__ = ["OPEN", "Need", "Refused", "Role", "Token", "Tokens", "confined"]

# What an endpoint asks for: `quota` is looking at one's own numbers, `read` what admins look at.
Need = Literal["check", "quota", "read", "admin"]

LOOK_SECONDS: Final = 1.0
# Longer ones are refused unread; a secret of ours has 46 characters.
SECRET_LENGTH_MAX: Final = 512

_MAY: Final[dict[Role, frozenset[Need]]] = {
    "check": frozenset({"check", "quota"}),
    "read": frozenset({"quota", "read"}),
    "admin": frozenset({"check", "quota", "read", "admin"}),
}
# Where a request is asked about, so that a scope can be held to.
_CONFINED: Final[frozenset[Need]] = frozenset({"check", "quota"})
# The least role for each need, for what the refusals advise.
_ROLE_FOR: Final[dict[Need, Role]] = {
    "check": "check",
    "quota": "read",
    "read": "read",
    "admin": "admin",
}
# Whoever asks where no tokens are asked for.
OPEN: Final = Token("anyone", "check")
_PLACES_BYTES: Final = 8

log = logging.getLogger("tollkeeper.service")


class Refused(NamedTuple):
    """Why somebody may not: 401, who are you; or 403, not you."""

    status: Literal[401, 403]
    detail: str

    @property
    def code(self) -> str:
        """For programs."""
        return "UNAUTHENTICATED" if self.status == 401 else "PERMISSION_DENIED"

    @property
    def challenge(self) -> str:
        """The value of WWW-Authenticate, which a 401 has to have."""
        return 'Bearer realm="tollkeeper"'


class Tokens:
    """The tokens of a file, as they are now."""

    def __init__(
        self, path: Path | None, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Use `Tokens.load`, which says what is wrong with a file."""
        self._path = path
        self._monotonic_s = monotonic_s
        self._look_at_s = 0.0
        self._seen: tuple[int, int, int] | None = None
        self._told = ""
        # By the beginning of the hash; what is compared in constant time is the rest.
        self._by_place: dict[bytes, list[tuple[bytes, Token]]] = {}
        self._demanded = False

    @classmethod
    def load(
        cls,
        path: Path | str | None,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        demanded: bool = False,
    ) -> Self:
        """The tokens in a file; None, or a file that does not exist yet, asks checks for none.

        Unless they are `demanded`: a file that has gone or was broken since somebody saw it opens
        nothing until it is mended. Otherwise raises ConfigError for a file that cannot be read.
        """
        tokens = cls(None if path is None else Path(path), monotonic_s)
        tokens._demanded = demanded
        if demanded:
            tokens._look_again()
        else:
            tokens._look()
            tokens._look_at_s = monotonic_s() + LOOK_SECONDS
        return tokens

    @property
    def demanded(self) -> bool:
        """Must even a check bring a token?"""
        return self._demanded

    def find(self, secret: str) -> Token | None:
        """Whose secret this is."""
        if len(secret) > SECRET_LENGTH_MAX:
            return None
        digest = sha256(secret.encode("utf-8", "replace")).digest()
        for each, token in self._by_place.get(digest[:_PLACES_BYTES], ()):
            if hmac.compare_digest(each, digest):
                return token
        return None

    def permitted(self, authorization: str | None, needed: Need) -> Token | Refused:
        """Who asks, if he may; `authorization` is the header's value, and `needed` what for."""
        if self._path is not None and self._monotonic_s() >= self._look_at_s:
            self._look_again()
        if not self._demanded and needed in _CONFINED:
            return OPEN
        if authorization is None:
            return self._unknown(needed, "this needs a token")
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return self._unknown(needed, "the Authorization header is not `Bearer tk_…`")
        token = self.find(secret.strip())
        if token is None:
            return self._unknown(needed, "this token is not known here")
        if needed not in _MAY[token.role]:
            said = f"token {show(token.name)} has the role {token.role}, which may not do this"
        elif token.scope and needed not in _CONFINED:
            said = f"token {show(token.name)} is confined to a scope, and this is about everything"
        else:
            return token
        return Refused(403, f"{said}; {self._advice(needed)}")

    def _unknown(self, needed: Need, said: str) -> Refused:
        return Refused(
            401, f"{said}; send `Authorization: Bearer tk_…`, and {self._advice(needed)}"
        )

    def _advice(self, needed: Need) -> str:
        # Not where the file is: whoever reads this may be a stranger.
        what = "the service's token file"
        if self._path is None:
            what = "and start with `tollkeeper serve --tokens FILE`"
        role = _ROLE_FOR[needed]
        return f"make one with: tollkeeper token create NAME --role {role} --tokens FILE ({what})"

    def _look_again(self) -> None:
        self._look_at_s = self._monotonic_s() + LOOK_SECONDS
        try:
            self._look()
            self._told = ""
        except ConfigError as error:
            if str(error) != self._told:  # it is read again every second, and told once
                self._told = str(error)
                log.warning("tokens: those that were read last stay: %s", error)

    def _look(self) -> None:
        """Read the file, if it looks different. Raises ConfigError."""
        if self._path is None:
            return
        try:
            found = os.stat(self._path)  # noqa: PTH116 - on the path of a check: no object for it
        except FileNotFoundError:
            if self._seen is not None:
                self._seen = None
                log.warning("tokens: %s is gone; those that were read last stay", self._path)
            return
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        # By the time of the last change of any kind: `chmod` may be what makes it readable.
        looks = (found.st_ino, found.st_ctime_ns, found.st_size)
        if looks == self._seen:
            return
        # Only what was read is known: one that could not be opened for a moment may be the one that
        # takes somebody's rights away.
        self._use(token_file.read(self._path))
        self._seen = looks

    def _use(self, tokens: tuple[Token, ...]) -> None:
        places: dict[bytes, list[tuple[bytes, Token]]] = {}
        for token in tokens:
            digest = bytes.fromhex(token.sha256)
            places.setdefault(digest[:_PLACES_BYTES], []).append((digest, token))
        self._by_place = places
        self._demanded = True


def confined(token: Token, request: Request) -> Request | Refused:
    """The request, with the values of the token's scope; or why it is out of it."""
    if not token.scope:
        return request
    filled: dict[str, str] = {}
    attributes: dict[str, str] = {}
    for name, given in token.scope.items():
        wanted = counted_address(given) if name == "ip" else given
        is_field = name in REQUEST_FIELDS
        value = getattr(request, name) if is_field else request.attributes.get(name)
        if value is None:
            (filled if is_field else attributes)[name] = wanted
        elif value != wanted:
            return Refused(
                403,
                f"token {show(token.name)} is for {name}={show(wanted)} alone, "
                f"and this is {name}={show(value)}",
            )
    if not filled and not attributes:
        return request
    return replace(request, **filled, attributes={**request.attributes, **attributes})
