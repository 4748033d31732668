"""Sessions of the console and one-time login links, as files that all workers of a node share.

An operator logs in with a token, or with a one-time link that the owner of the data folder made.
The browser gets a random secret in a cookie. The folder has one file per session, whose name is the
SHA-256 of the secret, so a reader of the folder cannot use a session.

A session of a token keeps the hash of the token and no rights: its rights are those that the token
has at each request. If the token is removed, its sessions end. A session ends at the latest
SESSION_SECONDS after the login.

A link is a file, too. To use it is to remove its file, which only one request can do.
"""

from __future__ import annotations

import getpass
import os
import secrets
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.http.tokens import Role, Token, Tokens

# Where the console is. A one-time link is CONSOLE/link/CODE.
CONSOLE: Final = "/console"
# The folder of the sessions in the data folder.
FOLDER: Final = "sessions"
SESSION_SECONDS: Final = 12 * 3600
LINK_SECONDS: Final = 15 * 60
# A login beyond this ends the oldest session of the token that has the most.
SESSIONS_MAX: Final = 1_000
_SECRET_BYTES: Final = 32
_SECRET_LENGTH_MAX: Final = 64
_FILE_BYTES_MAX: Final = 4_096
_SESSION: Final = "session-"
_LINK: Final = "link-"


class LinkFile(msgspec.Struct):
    """The rights of a one-time link: the name for the audit log, and the role."""

    name: str
    role: Role
    expires_s: float


class SessionFile(msgspec.Struct):
    """A session, as it is stored."""

    name: str
    role: Role
    csrf: str
    """The secret that every form of the session contains."""
    created_s: float
    expires_s: float
    token: str = ""
    """The hash of the token; empty for a session that began with a link."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session that has not ended, with the rights that it has now."""

    key: str
    """The name of its file."""
    token: Token
    csrf: str
    created_s: float
    expires_s: float

    @property
    def can_change(self) -> bool:
        """True if the operator may change something."""
        return self.token.role == "admin"


_Stored = TypeVar("_Stored", LinkFile, SessionFile)


class Sessions:
    """The sessions in a folder. It is created at the first login."""

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now_s = now_s

    @classmethod
    def of(cls, data: Path | str) -> Self:
        """Return the sessions of a data folder."""
        return cls(Path(data) / FOLDER)

    def begin(self, token: Token) -> str:
        """Begin a session and return the secret for the cookie. Raises ConfigError."""
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        now_s = self._now_s()
        self._clean()
        self._write(
            _named(_SESSION, secret),
            SessionFile(
                name=token.name,
                role=token.role,
                csrf=secrets.token_urlsafe(_SECRET_BYTES),
                created_s=now_s,
                expires_s=now_s + SESSION_SECONDS,
                token=token.sha256,
            ),
        )
        return secret

    def find(self, secret: str | None, tokens: Tokens) -> Session | None:
        """Return the session of a cookie; None if there is none, or it has ended."""
        if not secret or len(secret) > _SECRET_LENGTH_MAX:
            return None
        return self._session(_named(_SESSION, secret), tokens)

    def all(self, tokens: Tokens) -> list[Session]:
        """Return the sessions that have not ended, the newest first."""
        found = (self._session(path.name, tokens) for path in self._files(_SESSION))
        return sorted(
            (each for each in found if each is not None), key=lambda each: -each.created_s
        )

    def _session(self, key: str, tokens: Tokens) -> Session | None:
        stored = self._read(key, SessionFile)
        if stored is None or stored.expires_s <= self._now_s():
            return None
        token: Token | None = Token(stored.name, stored.role)
        if stored.token:
            token = tokens.with_digest(stored.token)
        if token is None:
            return None
        return Session(key, token, stored.csrf, stored.created_s, stored.expires_s)

    def end(self, key: str) -> bool:
        """End a session; return False if it has ended before."""
        return key.startswith(_SESSION) and "/" not in key and self._remove(key)

    def end_all(self) -> int:
        """End all sessions, also those of unknown tokens, and all links; return how many ended."""
        ended = [self._remove(path.name) for path in list(self._files(_SESSION))]
        for path in list(self._files(_LINK)):
            self._remove(path.name)
        return sum(ended)

    # ── Links ──────────────────────────────────────────────────────────────────────────────────

    def make_link(self, name: str, role: Role) -> str:
        """Return the code of a new one-time link. Raises ConfigError."""
        Token(name, role)  # raises for a name or role that no token can have
        code = secrets.token_urlsafe(_SECRET_BYTES)
        self._clean()
        self._write(_named(_LINK, code), LinkFile(name, role, self._now_s() + LINK_SECONDS))
        return code

    def use_link(self, code: str) -> Token | None:
        """Return the rights that a link gives, and remove it; None if it cannot be used."""
        key = _named(_LINK, code[:_SECRET_LENGTH_MAX])
        stored = self._read(key, LinkFile)
        # Of several requests at the same time, one removes the file.
        if stored is None or not self._remove(key) or stored.expires_s <= self._now_s():
            return None
        return Token(stored.name, stored.role)

    # ── Files ──────────────────────────────────────────────────────────────────────────────────

    def _files(self, kind: str) -> Iterator[Path]:
        return self._folder.glob(f"{kind}*")

    def _clean(self) -> None:
        """Remove files that have expired, and sessions if there are too many.

        A client that logs in again and again ends its own sessions, and not those of others.
        """
        now_s = self._now_s()
        for path in self._files(_LINK):
            link = self._read(path.name, LinkFile)
            if link is None or link.expires_s <= now_s:
                self._remove(path.name)
        kept: defaultdict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
        for path in self._files(_SESSION):
            session = self._read(path.name, SessionFile)
            if session is None or session.expires_s <= now_s:
                self._remove(path.name)
            else:
                kept[session.name, session.token].append((session.created_s, path.name))
        for _ in range(sum(map(len, kept.values())) - SESSIONS_MAX + 1):
            most = max(kept.values(), key=len)
            oldest = min(most)
            most.remove(oldest)
            self._remove(oldest[1])

    def _read(self, key: str, kind: type[_Stored]) -> _Stored | None:
        try:
            with (self._folder / key).open("rb") as file:
                return msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=kind)
        except (OSError, msgspec.DecodeError):
            return None

    def _write(self, key: str, stored: LinkFile | SessionFile) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkstemp creates the file with mode 0600. A reader sees a whole file or none.
            number, temporary = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            with os.fdopen(number, "wb") as file:
                file.write(msgspec.json.encode(stored))
            Path(temporary).replace(self._folder / key)
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: the session cannot be written: {error.strerror}; "
                f"give the service a data folder that it can write to (--data)"
            ) from None

    def _remove(self, key: str) -> bool:
        with suppress(OSError):
            (self._folder / key).unlink()
            return True
        return False


def _named(kind: str, secret: str) -> str:
    return f"{kind}{sha256(secret.encode('utf-8', 'replace')).hexdigest()}"


def link_url(service: str, code: str) -> str:
    """Return the one-time link with this code.

    >>> link_url("http://127.0.0.1:8080", "abc")
    'http://127.0.0.1:8080/console/link/abc'
    """
    return f"{service.rstrip('/')}{CONSOLE}/link/{code}"


def login_name() -> str:
    """Return the name for the links of this user; `operator` for a user without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container whose user has no name
        return "operator"
