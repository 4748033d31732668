"""The service's log: one line per event, as JSON or as text, without secrets.

    {"ts": "2026-11-15T13:40:53.120Z", "level": "info", "event": "started", "node": "eu-1",
     "worker": 4711, "message": "…", …}

Everything that logs through Python's `logging` is printed like this: Ratekeeper, the server and the
libraries. Ratekeeper's own calls name the event and its fields:
`log.info("…", extra=event("started", rules="3"))`. The formatters remove tokens, and passwords in
URLs, from every line.
"""

from __future__ import annotations

import json
import logging
import os
import re
from datetime import UTC, datetime
from typing import Any, Final

LINE_LENGTH_MAX: Final = 8_192

_TOKEN: Final = re.compile(r"rk_[A-Za-z0-9_-]{16,}")
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s{1,9}[A-Za-z0-9._~+/=-]+")
# One-time login links of the console.
_LINK: Final = re.compile(r"(/console/link/)[A-Za-z0-9_-]+")
# The bounds keep this fast on any text: it runs on every line, whatever it holds.
_PASSWORD: Final = re.compile(r"(?i)(?P<scheme>[a-z][a-z0-9+.-]{0,30}://)[^/\s@]{0,1000}@")
_ACCESS: Final = "granian.access"
# Neither the query nor the headers of a request are logged: they hold keys.
_ACCESS_FIELDS: Final = ("addr", "method", "path", "protocol", "status")
ACCESS_FORMAT: Final = "%(addr)s %(method)s %(path)s %(status)d %(dt_ms).3f ms"


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a log call: the name of the event and its fields."""
    return {"event": name, "fields": fields}


def without_secrets(text: str) -> str:
    """Return the text without tokens, login links and passwords in URLs.

    >>> without_secrets("redis://app:s3cret@db/0 for rk_0123456789abcdefghij")
    'redis://…@db/0 for rk_…'
    """
    text = _TOKEN.sub("rk_…", text)
    text = _BEARER.sub(r"\1 …", text)
    text = _LINK.sub(r"\1…", text)
    return _PASSWORD.sub(r"\g<scheme>…@", text)


class LineFormatter(logging.Formatter):
    """The message of a record, without secrets and of bounded length."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def _message(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        # Secrets are removed before the text is cut: half a secret would not be recognised.
        return without_secrets(text[: 2 * LINE_LENGTH_MAX])[:LINE_LENGTH_MAX]


class JsonFormatter(LineFormatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        found: dict[str, Any] = {
            "ts": _time(record.created),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name.lstrip("_")),
            "node": self._node,
            "worker": os.getpid(),
        }
        if record.name == _ACCESS and isinstance(record.args, dict):
            found |= _access(record.args)
        else:
            found["message"] = self._message(record)
        for name, value in getattr(record, "fields", {}).items():
            found[name] = without_secrets(value) if isinstance(value, str) else value
        return json.dumps(found, default=str)


class TextFormatter(LineFormatter):
    """Formats a record for people. A message may have several lines; a request never has.

    The path of a request comes from a client and may hold line breaks and terminal escapes.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the time, the level from warning up, and the message."""
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S")
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        kept = "" if record.name == _ACCESS else "\n"
        return f"{time} {level}{_printable(self._message(record), kept)}"


def _printable(text: str, kept: str) -> str:
    """Return the text with unprintable characters escaped, except those in `kept`.

    >>> _printable("/a\\x1b[31m\\nb", kept="")
    '/a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else repr(each)[1:-1] for each in text
    )


def _access(args: Any) -> dict[str, Any]:
    found = {name: args.get(name) for name in _ACCESS_FIELDS}
    path = found.get("path")
    if isinstance(path, str):
        found["path"] = without_secrets(path[: 2 * LINE_LENGTH_MAX])[:LINE_LENGTH_MAX]
    return {"event": "access", **found, "duration_ms": round(args.get("dt_ms", 0.0), 3)}


def _time(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def configuration(log_format: str, node: str) -> dict[str, Any]:
    """Return the configuration for `logging.config.dictConfig`, in the main process and workers."""
    formatter = "TextFormatter" if log_format == "text" else "JsonFormatter"
    handled = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": f"{__name__}.{formatter}", "node": node}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "ratekeeper": {**handled, "level": "INFO"},
            "_granian": {**handled, "level": "WARNING"},
            _ACCESS: {**handled, "level": "INFO"},
        },
    }
