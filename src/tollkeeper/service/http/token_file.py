"""API tokens on disk: who they are for, what they may do, and a hash of each.

A secret is 256 random bits, made here, shown once and kept nowhere: the file holds its SHA-256.
Nobody can guess 256 bits, so no salt and no slow hash is needed. The file is replaced by a rename,
so that whoever reads it sees all of it, and those who change it wait for each other.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import check_name
from tollkeeper.core.subjects import KEY_LENGTH_MAX, SEPARATOR

Role = Literal["check", "read", "admin"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

FORMAT: Final = 1
TOKENS_MAX: Final = 10_000
SCOPE_FIELDS_MAX: Final = 8
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
SECRET_PREFIX: Final = "tk_"  # noqa: S105 - what every secret begins with, so that scanners find it
_SECRET_BYTES: Final = 32
# Those who can write it can give themselves any token.
_OTHERS_WRITE: Final = 0o022


@dataclass(frozen=True, slots=True)
class Token:
    """Somebody who may ask, and for what.

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
            raise ConfigError("a token has a name, so that it can be removed; give it one")
        if self.role not in ROLES:
            raise ConfigError(
                f"role={show(self.role)} of token {show(self.name)} is not known; "
                f"choose one of {', '.join(ROLES)}"
            )
        _check_scope(self.scope, self.name)
        if self.scope and self.role == "admin":
            raise ConfigError(
                f"token {show(self.name)}: an admin may do everything, so a scope would promise "
                f"too much; drop it, or choose the role check or read"
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
                f"the scope of token {show(name)} wants {field_name}={show(value)}, which is not "
                f"text of 1 to {KEY_LENGTH_MAX} characters; {hint}"
            )


def digest_of(secret: str) -> str:
    """What is kept of a secret."""
    return sha256(secret.encode("utf-8", "replace")).hexdigest()


def read(path: Path) -> tuple[Token, ...]:
    """The tokens in a file, in the order they were made. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS_WRITE:
                raise ConfigError(
                    f"{path} can be written by others, who could give themselves any token; "
                    f"run: chmod 600 {path}"
                )
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: the tokens cannot be read: {error.strerror}; "
            f"make one with: tollkeeper token create NAME --role check --tokens {path}"
        ) from None
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX:,} bytes; remove tokens from it")
    try:
        return _tokens(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        said = error if isinstance(error, ConfigError) else f"not a token file ({error!r})"
        raise ConfigError(
            f"{path}: {said}; change it with `tollkeeper token` and not by hand"
        ) from None


def _tokens(data: Any) -> tuple[Token, ...]:
    if data["version"] != FORMAT:
        raise ConfigError(f"version {show(data['version'])} is not {FORMAT}, which is known here")
    found = tuple(_token(**entry) for entry in data["tokens"])
    if len(found) > TOKENS_MAX:
        raise ConfigError(f"more than {TOKENS_MAX:,} tokens")
    if len({token.name for token in found}) < len(found):
        raise ConfigError("two tokens have one name")
    return found


def _token(name: str, role: Role, sha256: str, scope: Any, created: str) -> Token:
    if len(bytes.fromhex(sha256)) != 32 or not isinstance(created, str):
        raise ValueError(name)
    token = Token(name, role, scope, sha256.lower(), created)
    # A copy, so that nobody changes it afterwards.
    object.__setattr__(token, "scope", MappingProxyType(dict(scope)))
    return token


def create(path: Path, name: str, role: Role, scope: Mapping[str, str] | None = None) -> str:
    """Add a token; its secret, which is nowhere else. Raises ConfigError."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    token = Token(name, role, dict(scope or {}), digest_of(secret), created)
    with _changing(path) as tokens:
        if any(each.name == name for each in tokens):
            raise ConfigError(
                f"{path} has a token {show(name)} already; remove it first, or choose another name"
            )
        if len(tokens) >= TOKENS_MAX:
            raise ConfigError(f"{path} has {TOKENS_MAX:,} tokens, which is all it may; remove some")
        tokens.append(token)
    return secret


def remove(path: Path, name: str) -> None:
    """Take a token's rights away. Raises ConfigError if there is none of this name."""
    with _changing(path) as tokens:
        kept = [each for each in tokens if each.name != name]
        if len(kept) == len(tokens):
            raise ConfigError(
                f"{path} has no token {show(name)}; see which there are: tollkeeper token list"
            )
        tokens[:] = kept


@contextmanager
def _changing(path: Path) -> Iterator[list[Token]]:
    """The tokens, to be changed by nobody else meanwhile, and written at the end."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            tokens = list(read(path)) if path.exists() else []
            yield tokens
            _write(path, tokens)
    except OSError as error:
        raise ConfigError(f"{path}: the tokens cannot be written: {error.strerror}") from None


def _write(path: Path, tokens: list[Token]) -> None:
    entries = [
        {
            "name": each.name,
            "role": each.role,
            "sha256": each.sha256,
            "scope": dict(each.scope),
            "created": each.created,
        }
        for each in tokens
    ]
    text = json.dumps({"version": FORMAT, "tokens": entries}, indent=2) + "\n"
    # mkstemp makes it 0600.
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
