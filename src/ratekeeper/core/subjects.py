"""Subjects: turn a key, or a request's attributes, into the text that counts are stored under.

Two different keys must never share a subject. So the parts of a compound key are joined by a
character that no part may contain: ("a/b", "c") and ("a", "b/c") have different subjects, and so
has every plain string. (A tuple of one part equals that part.) A client that controls one part of a
key cannot choose another client's subject. That includes a long value, of which the subject has a
digest: `user#5f0c…` stands for a digest, and every plain value of a user follows `user:`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from ratekeeper.core.errors import ConfigError, InvalidKey, show
from ratekeeper.core.model import REQUEST_FIELDS, Request

KEY_LENGTH_MAX: Final = 512
PARTS_MAX: Final = 16
# The ASCII unit separator.
SEPARATOR: Final = "\x1f"
# Values longer than this are replaced by a digest if all values together are too long for a key.
_LONG: Final = 48

# The kinds of subjects that are logged with their value.
_SHOWN: Final = frozenset(
    {"address", "ip", "user", "tenant", "tier", "endpoint", "method", "origin"}
)
# The kinds of sources whose name is a part of the subject, as in `header:x-api-key:…`.
_SOURCES: Final = frozenset(
    {"header", "trusted_header", "unverified_claim", "claim", "query", "cookie", "session"}
)
_KIND: Final = re.compile(r"[a-z_]{1,32}")
_ID: Final = re.compile(r"[0-9]{1,9}")
_FUNCTION: Final = re.compile(r"[A-Za-z_]+(?:\.[A-Za-z_<>]+)+")
# A digest of the middleware. It is longer than ours, so that a value which a client chose never
# looks like the digest of another client.
_DIGEST: Final = re.compile(r"#[0-9a-f]{32}")
_DIGEST_BYTES: Final = 12
_TEXT_LENGTH_MAX: Final = 100

Key = str | tuple[str, ...]
"""The subject that is counted: a text such as "user:42", or a tuple such as ("acme", "42")."""


def subject_of(key: Key) -> str:
    """Return the subject that a key names.

    >>> subject_of("user:42")
    'user:42'
    >>> subject_of(("a/b", "c")) == subject_of(("a", "b/c"))
    False

    Raises InvalidKey for a key that is not text, is empty, has more than 512 characters in all, or
    contains the separator.
    """
    if type(key) is str:
        # Nearly every key passes this test; the others get the checks that explain the error.
        if not (0 < len(key) <= KEY_LENGTH_MAX and key.isascii() and SEPARATOR not in key):
            _check_part(key, key)
        return key
    if isinstance(key, tuple) and 1 <= len(key) <= PARTS_MAX:
        for part in key:
            _check_part(part, key)
        subject = SEPARATOR.join(key)
        if len(subject) <= KEY_LENGTH_MAX:
            return subject
        raise InvalidKey(
            f"a key has at most {KEY_LENGTH_MAX} characters, but this one has {len(subject)}; "
            f"hash the longest part"
        )
    if isinstance(key, str):  # a subclass of str, such as a member of a StrEnum
        return subject_of(str.__str__(key))
    raise InvalidKey(
        f"a key is text or a tuple of 1 to {PARTS_MAX} texts, not {type(key).__name__}; "
        f'for example "user:42" or ("tenant:7", "user:42")'
    )


def _check_part(part: object, key: object) -> None:
    if not isinstance(part, str):
        raise InvalidKey(
            f"the parts of a key are text, but {show(part)} is {type(part).__name__}; "
            f"convert it to text"
        )
    if not part or len(part) > KEY_LENGTH_MAX:
        size = "is empty" if not part else f"has {len(part)} characters"
        raise InvalidKey(
            f"a key has 1 to {KEY_LENGTH_MAX} characters, but this one {size}; "
            f"hash a longer identifier, and use one key for all anonymous callers"
        )
    if SEPARATOR in part:
        raise InvalidKey(
            f"{show(key)} contains the character U+001F, which separates the parts of a key; "
            f"remove it from the identifier"
        )
    if not part.isascii():
        try:
            part.encode()
        except UnicodeEncodeError:
            raise InvalidKey(
                f"{show(key)!a} contains half of a surrogate pair, which is not valid text; "
                f'decode the identifier with errors="replace" first'
            ) from None


def beyond(begin: str) -> str | None:
    """Return the first text after all texts with this beginning; None if there is none.

    >>> beyond("user:4"), beyond("")
    ('user:5', None)
    """
    start = begin.rstrip("\U0010ffff")
    if not start:
        return None
    following = ord(start[-1]) + 1
    # No text has half of a surrogate pair.
    return start[:-1] + chr(0xE000 if 0xD800 <= following < 0xE000 else following)


def require_text(name: str, value: object) -> str:
    """Return the value of a request's attribute; raise InvalidKey unless it is text.

    A number would match no pattern and no list entry, and so evade a limit.
    """
    if isinstance(value, str):
        return value
    raise InvalidKey(
        f"{name}={show(value)} is {type(value).__name__}, but a request's attributes are text; "
        f"convert it to text"
    )


def subject_of_request(request: Request, by: Sequence[str]) -> str:
    """Return the subject of a request that is counted by these attributes.

    >>> subject_of_request(Request(tenant="t1", user="42"), by=["tenant", "user"])
    'tenant:t1\\x1fuser:42'

    The attribute's name is part of the subject, so user 42 and tenant 42 are two subjects. An
    attribute that the request does not have becomes its name alone: all such requests share one
    quota. If the values are too long together, digests replace the long ones.
    """
    parts = []
    for name in by:
        value = getattr(request, name) if name in REQUEST_FIELDS else request.attributes.get(name)
        if value is not None and not isinstance(value, str):
            require_text(name, value)
        # Not formatted: the text of an enumeration's member is its value, not its name.
        parts.append(name if value is None else name + ":" + value)
    if len(parts) > 1 and sum(map(len, parts)) + len(parts) > KEY_LENGTH_MAX:
        parts = [_shortened(part, name) for part, name in zip(parts, by, strict=True)]
    return subject_of(tuple(parts))


def _shortened(part: str, name: str) -> str:
    """Return a part of a subject, as a digest if it is long and would be valid alone."""
    if not _LONG < len(part) <= KEY_LENGTH_MAX or SEPARATOR in part:
        return part
    digest = blake2b(part.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    # No plain part has a # after the name: it is the name alone, or a colon follows.
    return f"{name}#{digest}"


def check_by(by: Sequence[str]) -> tuple[str, ...]:
    """Return `by` as a tuple; raise ConfigError if it is not a list of attribute names."""
    hint = 'for example by=["tenant", "user"]'
    if not isinstance(by, list | tuple) or not 1 <= len(by) <= PARTS_MAX:
        raise ConfigError(f"by={show(by)} is not a list of 1 to {PARTS_MAX} names; {hint}")
    for name in by:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"by={show(by)}: {show(name)} is not an attribute name; {hint}")
    if len(set(by)) != len(by):
        raise ConfigError(f"by={show(by)} names an attribute twice; {hint}")
    return tuple(by)


def shown_subject(subject: str) -> str:
    """Return a subject for a log, without secrets and of bounded length.

    Values are digests, as the records of the service have them, except for kinds that hold no
    secret, short numbers and names of functions. Unprintable characters are escaped.

    >>> shown_subject("user:42"), shown_subject("shop.mail.send"), shown_subject("api_key:sk_1")
    ('user:42', 'shop.mail.send', 'api_key:#278dea8072ad04bd591c160d')
    """
    text = " ".join(map(_shown_part, subject.split(SEPARATOR)))
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= _TEXT_LENGTH_MAX else f"{text[:_TEXT_LENGTH_MAX]}…"


def _shown_part(part: str) -> str:
    kind, colon, value = part.partition(":")
    if kind in _SHOWN or _FUNCTION.fullmatch(part) or not part:
        return part
    if not colon:
        return _digest(part)
    if kind in _SOURCES:
        name, colon, rest = value.partition(":")
        return f"{kind}:{name}:{_digest(rest)}" if colon else part
    if not _KIND.fullmatch(kind):
        return _digest(part)
    return part if _ID.fullmatch(value) else f"{kind}:{_digest(value)}"


def _digest(value: str) -> str:
    if _DIGEST.fullmatch(value):
        return value
    digest = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
    return f"#{digest.hexdigest()}"
