"""API tokens: which clients may call the service, and for what.

A token has a role. `check` may spend units and look at quotas. `limit` may also give limits with a
call. `read` may look at quotas and at everything in the admin API. `admin` may do everything. A
token can be confined to a scope: the named field of each request must have the scope's value, and a
request without the field gets it.

A secret is 256 random bits. It is made here, shown once and never stored: the token file holds its
SHA-256. An attacker cannot guess 256 bits, so the hash needs no salt and need not be slow. A
change of the file replaces it by a rename under a lock, so a reader always sees a whole file.

Without a token file, every client that can connect may check. `ratekeeper serve` makes sure that
only this machine can connect then, and may also look at the node and its fleet, as at the metrics.
The rest of the admin API always needs a token.

The file is examined at most once a second. If it disappears or cannot be read, the tokens that were
read last stay valid: no such error opens the service.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import REQUEST_FIELDS, Request, check_name
from ratekeeper.core.subjects import KEY_LENGTH_MAX, SEPARATOR
from ratekeeper.web.addresses import counted_address

Role = Literal["check", "limit", "read", "admin"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
# The permission that an endpoint requires. `quota`: the caller's own numbers. `node`: the state of
# the node and its fleet. `read`: the admin API.
Permission = Literal["check", "limit", "quota", "node", "read", "admin"]

FORMAT: Final = 1
TOKENS_MAX: Final = 10_000
SCOPE_FIELDS_MAX: Final = 8
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
SECRET_PREFIX: Final = "rk_"  # noqa: S105 - the prefix of every secret, for secret scanners
# Of a longer secret, only the beginning is hashed, which matches no token: those have 46.
SECRET_LENGTH_MAX: Final = 512
REFRESH_SECONDS: Final = 1.0
_SECRET_BYTES: Final = 32
_DIGEST_PREFIX_BYTES: Final = 8
# Any user who can write the file can add a token with any role.
_WRITABLE_BY_OTHERS: Final = 0o022

_PERMISSIONS: Final[dict[Role, frozenset[Permission]]] = {
    "check": frozenset({"check", "quota"}),
    "limit": frozenset({"check", "limit", "quota"}),
    "read": frozenset({"quota", "node", "read"}),
    "admin": frozenset({"check", "limit", "quota", "node", "read", "admin"}),
}
# The permissions that concern one request, so that a scope can be enforced.
_SCOPED: Final[frozenset[Permission]] = frozenset({"check", "limit", "quota"})
# The permissions that need no token while there is no token file.
_OPEN: Final[frozenset[Permission]] = frozenset({*_SCOPED, "node"})
# The smallest role with each permission, for the advice in error messages.
_ROLE_FOR: Final[dict[Permission, Role]] = {
    "check": "check",
    "limit": "limit",
    "quota": "read",
    "node": "read",
    "read": "read",
    "admin": "admin",
}

log = logging.getLogger("ratekeeper.service")


@dataclass(frozen=True, slots=True)
class Token:
    """A client of the service and its rights.

    `scope` confines it: a request's field must have this value, for example {"tenant": "acme"}.
    """

    name: str
    role: Role
    scope: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    sha256: str = field(default="", repr=False)
    created: str = ""

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if not self.name:
            raise ConfigError("a token needs a name, so that it can be removed; give it one")
        if self.role not in ROLES:
            raise ConfigError(
                f"role={show(self.role)} of token {show(self.name)} is not known; "
                f"choose one of {', '.join(ROLES)}"
            )
        _check_scope(self.scope, self.name)
        if self.scope and self.role == "admin":
            raise ConfigError(
                f"token {show(self.name)}: an admin may do everything, so a scope would have no "
                f"effect; drop it, or choose the role check, limit or read"
            )


def _check_scope(scope: object, name: str) -> None:
    hint = 'for example {"tenant": "acme"}'
    if not isinstance(scope, Mapping) or len(scope) > SCOPE_FIELDS_MAX:
        raise ConfigError(
            f"the scope of token {show(name)} is not a mapping of at most {SCOPE_FIELDS_MAX} "
            f"fields to their values; {hint}"
        )
    for field_name, value in scope.items():
        if not isinstance(field_name, str) or not field_name.isidentifier():
            raise ConfigError(
                f"the scope of token {show(name)} names {show(field_name)}, which is not a "
                f"request's field or attribute; {hint}"
            )
        if not isinstance(value, str) or not 0 < len(value) <= KEY_LENGTH_MAX or SEPARATOR in value:
            raise ConfigError(
                f"the scope of token {show(name)} has {field_name}={show(value)}, which is not "
                f"text of 1 to {KEY_LENGTH_MAX} characters; {hint}"
            )


# The member of an ASGI scope with the token of a caller in this process: the console calls the
# admin API for the operator who has logged in. No request from outside can set it.
CALLER: Final = "ratekeeper.token"
# The client of a service that does not require tokens.
OPEN: Final = Token("anyone", "check")


class TokenRejection(NamedTuple):
    """Why a caller was rejected.

    400: the headers that name the caller are ambiguous. 401: the token is missing or unknown. 403:
    it lacks a right.
    """

    status: Literal[400, 401, 403]
    detail: str

    @property
    def code(self) -> str:
        """The error code, for programs."""
        if self.status == 400:
            return "INVALID_REQUEST"
        return "UNAUTHENTICATED" if self.status == 401 else "PERMISSION_DENIED"

    @property
    def challenge(self) -> str:
        """The value of WWW-Authenticate, which every 401 must have."""
        return 'Bearer realm="ratekeeper"'


def confined(token: Token, request: Request) -> Request | TokenRejection:
    """Return the request with the values of the token's scope, or why it is outside the scope."""
    if not token.scope:
        return request
    filled: dict[str, Any] = {}
    attributes: dict[str, str] = {}
    matched = request.matched_as
    for name, given in token.scope.items():
        wanted = counted_address(given) if name == "ip" else given
        is_field = name in REQUEST_FIELDS
        value = _value_of(matched, name)
        if value is None:
            (filled if is_field else attributes)[name] = wanted
        elif value != wanted:
            return TokenRejection(
                403,
                f"token {show(token.name)} is confined to {name}={show(wanted)}, "
                f"but the request has {name}={show(_value_of(request, name))}",
            )
    if not filled and not attributes:
        return request
    return replace(request, **filled, attributes={**request.attributes, **attributes})


def _value_of(request: Request, name: str) -> str | None:
    if name not in REQUEST_FIELDS:
        return request.attributes.get(name)
    value: str | None = getattr(request, name)
    return value


# ── Authentication ─────────────────────────────────────────────────────────────────────────────


class Tokens:
    """The current tokens of a token file."""

    def __init__(
        self, path: Path | None, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Use `Tokens.load`, which also reads the file."""
        self._path = path
        self._monotonic_s = monotonic_s
        self._refresh_at_s = 0.0
        self._fingerprint: tuple[int, int, int] | None = None
        self._logged = ""
        # By the first bytes of the hash; the whole hash is compared in constant time.
        self._by_prefix: dict[bytes, list[tuple[bytes, Token]]] = {}
        self._required = False

    @classmethod
    def load(
        cls,
        path: Path | str | None,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        required: bool = False,
    ) -> Self:
        """Read a token file. With None, or a file that does not exist yet, checks need no token.

        With `required`, checks need a token even while the file is missing or broken, as it may be
        when a worker restarts. Otherwise raises ConfigError for a file that cannot be read.
        """
        tokens = cls(None if path is None else Path(path), monotonic_s)
        tokens._required = required
        if required:
            tokens._refresh()
        else:
            tokens._read_if_changed()
            tokens._refresh_at_s = monotonic_s() + REFRESH_SECONDS
        return tokens

    @property
    def required(self) -> bool:
        """True if every call needs a token, including a check."""
        return self._required

    @property
    def open_permissions(self) -> frozenset[Permission]:
        """The permissions that never need a token, because there is no token file."""
        return frozenset() if self._path is not None or self._required else _OPEN

    def permitted(
        self, authorization: str | None, permission: Permission
    ) -> Token | TokenRejection:
        """Return the caller's token if it has the permission, or why the caller is rejected.

        `authorization` is the value of the Authorization header.
        """
        if self._path is not None and self._monotonic_s() >= self._refresh_at_s:
            self._refresh()
        if not self._required and permission in _OPEN:
            return OPEN
        if authorization is None:
            return self._unauthenticated(permission, "this needs a token")
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return self._unauthenticated(
                permission, "the Authorization header is not `Bearer rk_…`"
            )
        secret = secret.strip()[: SECRET_LENGTH_MAX + 1]
        token = self._find(sha256(secret.encode("utf-8", "replace")).digest())
        if token is None:
            return self._unauthenticated(permission, "this token is unknown")
        return self.with_permission(token, permission)

    def with_digest(self, digest: str) -> Token | None:
        """Return the token whose secret has this hash; None if it has been removed."""
        if self._path is not None and self._monotonic_s() >= self._refresh_at_s:
            self._refresh()
        return self._find(bytes.fromhex(digest))

    def _find(self, digest: bytes) -> Token | None:
        alike = self._by_prefix.get(digest[:_DIGEST_PREFIX_BYTES], ())
        found = [token for each, token in alike if hmac.compare_digest(each, digest)]
        return found[0] if found else None

    def with_permission(self, token: Token, permission: Permission) -> Token | TokenRejection:
        """Return the token if it has the permission, or why its holder is rejected."""
        if permission not in _PERMISSIONS[token.role]:
            reason = f"token {show(token.name)} has the role {token.role}, which may not do this"
        elif token.scope and permission not in _SCOPED:
            reason = f"token {show(token.name)} is confined to a scope, but this concerns all data"
        else:
            return token
        return TokenRejection(403, f"{reason}; {self._advice(permission)}")

    def _unauthenticated(self, permission: Permission, reason: str) -> TokenRejection:
        advice = self._advice(permission)
        return TokenRejection(401, f"{reason}; send `Authorization: Bearer rk_…`, and {advice}")

    def _advice(self, permission: Permission) -> str:
        # Not the path of the file: the reader may be a stranger.
        where = "the service's token file"
        if self._path is None:
            where = "and start with `ratekeeper serve --tokens FILE`"
        role = _ROLE_FOR[permission]
        return f"make one with: ratekeeper token create NAME --role {role} --tokens FILE ({where})"

    def _refresh(self) -> None:
        self._refresh_at_s = self._monotonic_s() + REFRESH_SECONDS
        try:
            self._read_if_changed()
            self._logged = ""
        except ConfigError as error:
            if str(error) != self._logged:  # retried every second, logged once
                self._logged = str(error)
                log.warning("tokens: the tokens that were read last stay valid: %s", error)

    def _read_if_changed(self) -> None:
        """Read the file if it has changed. Raises ConfigError."""
        if self._path is None:
            return
        try:
            found = os.stat(self._path)  # noqa: PTH116 - on the path of a check: no object for it
        except FileNotFoundError:
            if self._fingerprint is not None:
                self._fingerprint = None
                log.warning(
                    "tokens: %s is gone; the tokens that were read last stay valid", self._path
                )
            return
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        # ctime changes with every kind of change, also a `chmod` that makes the file readable.
        fingerprint = (found.st_ino, found.st_ctime_ns, found.st_size)
        if fingerprint == self._fingerprint:
            return
        # Stored only after a successful read: a file that could not be opened for a moment may be
        # the one that removes a token.
        self._use(read_tokens(self._path))
        self._fingerprint = fingerprint

    def _use(self, tokens: tuple[Token, ...]) -> None:
        by_prefix: dict[bytes, list[tuple[bytes, Token]]] = {}
        for token in tokens:
            digest = bytes.fromhex(token.sha256)
            by_prefix.setdefault(digest[:_DIGEST_PREFIX_BYTES], []).append((digest, token))
        self._by_prefix = by_prefix
        self._required = True


# ── The token file ─────────────────────────────────────────────────────────────────────────────


def digest_of(secret: str) -> str:
    """Return the hash of a secret, as the file stores it."""
    return sha256(secret.encode("utf-8", "replace")).hexdigest()


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Return the tokens in a file, oldest first. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _WRITABLE_BY_OTHERS:
                raise ConfigError(
                    f"{path} can be written by other users, who could add a token with any role; "
                    f"run: chmod 600 {path}"
                )
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: the tokens cannot be read: {error.strerror}; "
            f"make one with: ratekeeper token create NAME --role check --tokens {path}"
        ) from None
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX:,} bytes; remove tokens from it")
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = error if isinstance(error, ConfigError) else f"not a token file ({error!r})"
        raise ConfigError(
            f"{path}: {reason}; change it with `ratekeeper token` and not by hand"
        ) from None


def _parse(data: Any) -> tuple[Token, ...]:
    if data["version"] != FORMAT:
        raise ConfigError(
            f"version {show(data['version'])} is unknown; this program reads version {FORMAT}"
        )
    if unknown := set(data) - {"version", "tokens"}:
        raise ConfigError(f"unknown field {show(min(unknown))}; it has version and tokens")
    found = tuple(_token(**entry) for entry in data["tokens"])
    if len(found) > TOKENS_MAX:
        raise ConfigError(f"more than {TOKENS_MAX:,} tokens")
    if len({token.name for token in found}) < len(found):
        raise ConfigError("two tokens have the same name")
    return found


def _token(name: str, role: Role, sha256: str, scope: Any, created: str) -> Token:
    if len(bytes.fromhex(sha256)) != 32 or not isinstance(created, str):
        raise ValueError(name)
    token = Token(name, role, scope, sha256.lower(), created)
    # A read-only copy.
    object.__setattr__(token, "scope", MappingProxyType(dict(scope)))
    return token


def create_token(path: Path, name: str, role: Role, scope: Mapping[str, str] | None = None) -> str:
    """Add a token to a file and return its secret, which is stored nowhere. Raises ConfigError."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    token = Token(name, role, dict(scope or {}), digest_of(secret), created)
    with _changing(path) as tokens:
        if any(each.name == name for each in tokens):
            raise ConfigError(
                f"{path} has a token {show(name)} already; remove it first, or choose another name"
            )
        if len(tokens) >= TOKENS_MAX:
            raise ConfigError(f"{path} has {TOKENS_MAX:,} tokens, the maximum; remove some")
        tokens.append(token)
    return secret


def remove_token(path: Path, name: str) -> None:
    """Remove a token from a file. Raises ConfigError if the file has no token of this name."""
    with _changing(path) as tokens:
        kept = [each for each in tokens if each.name != name]
        if len(kept) == len(tokens):
            raise ConfigError(
                f"{path} has no token {show(name)}; list its tokens with: ratekeeper token list"
            )
        tokens[:] = kept


@contextmanager
def _changing(path: Path) -> Iterator[list[Token]]:
    """Yield the file's tokens under its lock, and write them at the end."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            tokens = list(read_tokens(path)) if path.exists() else []
            yield tokens
            _write(path, tokens)
    except OSError as error:
        raise ConfigError(f"{path}: the tokens cannot be written: {error.strerror}") from None


def _write(path: Path, tokens: list[Token]) -> None:
    names = ("name", "role", "sha256", "scope", "created")
    entries = [{name: getattr(each, name) for name in names} for each in tokens]
    data = {"version": FORMAT, "tokens": entries}
    text = json.dumps(data, indent=2, default=dict) + "\n"  # a read-only scope becomes a dict
    # mkstemp creates the file with mode 0600.
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
