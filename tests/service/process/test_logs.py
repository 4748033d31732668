"""The service's log: one line per event, without secrets."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
from typing import Any

import pytest

from ratekeeper.service.process.logs import (
    ACCESS_FORMAT,
    JsonFormatter,
    TextFormatter,
    configuration,
    event,
    without_secrets,
)

SECRETS = [
    "rk_Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6",
    "Authorization: Bearer abc.def.ghi",
    "redis://app:pa55word@cache:6379/0",
    "postgresql://app:pa55word@db/rules",
    "GET /console/link/Zm9vYmFyYmF6-cXV4_Zm9v",
]
PARTS = ("Zm9v", "abc.def", "pa55word")


def record(message: str, *args: Any, name: str = "ratekeeper.service", **more: Any) -> Any:
    """Return a record as `logging` makes it."""
    made = logging.LogRecord(name, logging.WARNING, "x.py", 1, message, args, None)
    made.__dict__.update(more)
    return made


def test_event_is_one_line_of_json() -> None:
    """It has time, level, event, node, worker and the fields of the event."""
    line = JsonFormatter("eu-1").format(record("a\nb %s", "c", **event("started", rules="3", n=1)))
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("ts").endswith("Z")
    assert found == {
        "level": "warning",
        "event": "started",
        "node": "eu-1",
        "worker": os.getpid(),
        "message": "a\nb c",
        "rules": "3",
        "n": 1,
    }


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("formatter", [JsonFormatter("n"), TextFormatter("n")])
def test_secrets_are_removed(secret: str, formatter: logging.Formatter) -> None:
    """From the message, its arguments, its fields and a traceback."""
    try:
        int(secret)
    except ValueError:
        failed = sys.exc_info()
    made = record("%s " + secret, secret, exc_info=failed, **event("x", value=secret))
    line = formatter.format(made)
    assert not any(part in line for part in PARTS), line
    assert "ValueError" in line


@pytest.mark.parametrize("formatter", [JsonFormatter("n"), TextFormatter("n")])
def test_path_of_a_request_is_escaped(formatter: logging.Formatter) -> None:
    """Line breaks and terminal escapes are; a traceback keeps its lines."""
    args = {
        "addr": "192.0.2.1",
        "method": "GET",
        "path": "/a\nb\x1b[2J\r",
        "status": 404,
        "dt_ms": 1,
    }
    line = formatter.format(record(ACCESS_FORMAT, args, name="granian.access"))
    assert line.isprintable()
    assert "/a" in line
    line = formatter.format(record("said: %s", "a\x1b[2J\nb"))
    assert "\x1b" not in line
    if isinstance(formatter, TextFormatter):
        assert line.endswith("a\\x1b[2J\nb")


def test_other_text_is_kept() -> None:
    """An address without a password and the first letters of a key are no secrets."""
    text = "redis://cache:6379/0 rk_ a@b.example"
    assert without_secrets(text) == text


def test_access_log_has_no_query() -> None:
    """Queries hold keys."""
    args = {
        "addr": "127.0.0.1",
        "time": "…",
        "dt_ms": 1.23456,
        "status": 200,
        "path": "/v1/quota",
        "query_string": "api_key=sk_1",
        "method": "GET",
        "scheme": "http",
        "protocol": "HTTP/1.1",
    }
    made = record(ACCESS_FORMAT, name="granian.access")
    made.args = args
    found = json.loads(JsonFormatter("n").format(made))
    assert (found["event"], found["path"], found["status"]) == ("access", "/v1/quota", 200)
    assert found["duration_ms"] == 1.235
    assert "sk_1" not in TextFormatter("n").format(made) + str(found)


def test_length_of_a_line_is_bounded() -> None:
    """One message cannot fill the disk."""
    assert len(JsonFormatter("n").format(record("x" * 10**6))) < 10_000


@pytest.mark.parametrize("kind", ["json", "text"])
def test_configuration(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`logging` accepts it and then writes to the standard error."""
    before = logging.root.handlers[:], logging.root.level
    try:
        logging.config.dictConfig(configuration(kind, "n"))
        logging.getLogger("ratekeeper.service").info("hello", extra=event("greeting"))
        said = capsys.readouterr()
        assert "hello" in said.err
        assert not said.out
        assert (json.loads(said.err)["event"] == "greeting") if kind == "json" else True
    finally:
        logging.root.handlers[:], logging.root.level = before
        for name in ("ratekeeper", "_granian", "granian.access"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
