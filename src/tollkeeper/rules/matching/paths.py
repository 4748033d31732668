"""Paths: one spelling for each, so that no other spelling slips past a limit.

- The query, the fragment, and the scheme and host of an absolute request target go.
- Duplicate and trailing slashes go; a missing first slash is added.
- Percent-encoding goes, but for `/`, `?`, `#` and `%`, which would change what the path means, and
  for bytes that are not UTF-8: those stay, in capitals. `/caf%c3%a9` and `/café` are one path.
- `.` and `..` segments are resolved, also as `%2e`, as proxies do before they pass a request on.

Case stays, and so does `;`, which is a character like any other. An endpoint is to be given as it
came over the wire, or as the framework's route template: in a path that was decoded already, a `?`
may be part of a segment, and would be taken for the start of the query.
"""

from __future__ import annotations

import re
from typing import Final

from tollkeeper.core.errors import ConfigError, show

# Nearly every path is normal already, and this is all it costs then. Segments that start with a
# dot go the long way, though most are as harmless as /.well-known.
_is_normal: Final = re.compile(r"(?:/[^./%?#\ud800-\udfff][^/%?#\ud800-\udfff]*+)+|/").fullmatch
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*+://[^/?#]*+")
_PERCENT: Final = re.compile(rb"%([0-9A-Fa-f]{2})?")
_NOT_UTF8: Final = re.compile(r"[\udc80-\udcff]")
_METHOD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


def normalised(path: str) -> str:
    """The one spelling of a path, which patterns are compared with.

    >>> normalised("//v1/./orders/%34%32/?page=2")
    '/v1/orders/42'

    Normalising twice changes nothing. Takes any text and never raises.
    """
    if _is_normal(path):
        return path
    if origin := _ORIGIN.match(path):
        path = path[origin.end() :]
    path = path.partition("?")[0].partition("#")[0].rstrip("/")
    # A query and a trailing slash are common, and then this is all that was left to do.
    if _is_normal(path):
        return path
    kept: list[str] = []
    for segment in decoded(path).split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in {"", "."}:
            kept.append(segment)
    return "/" + "/".join(kept)


def decoded(text: str) -> str:
    """Without percent-encoding, where that leaves the meaning as it is.

    >>> decoded("a%2Ab%2fc")
    'a*b%2Fc'
    """
    if "%" not in text and text.isascii():
        return text
    try:
        # Servers hand bytes that are not UTF-8 on as surrogates.
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        encoded = text.encode("utf-8", "surrogatepass")
    plain = _PERCENT.sub(_decoded_byte, encoded).decode("utf-8", "surrogateescape")
    return _NOT_UTF8.sub(lambda found: f"%{ord(found[0]) - 0xDC00:02X}", plain)


def _decoded_byte(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        return b"%25"  # a bare %: left so, it could join with what is decoded after it
    byte = bytes.fromhex(found[1].decode())
    return found[0].upper() if byte in b"/?#%" else byte


def compile_method(text: str) -> str:
    """An HTTP method in capitals, which is how methods are compared; or a ConfigError.

    >>> compile_method("post")
    'POST'
    """
    if not isinstance(text, str) or not _METHOD.fullmatch(text):
        raise ConfigError(f"method {show(text)} is not the name of one; write it like POST")
    return text.upper()
