"""What the service sends back: a status, headers and a body; and every error as problem JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tollkeeper.core.errors import CapacityError, ConfigError, StoreError
from tollkeeper.core.model import CheckResult
from tollkeeper.service.http.tokens import Refused
from tollkeeper.service.http.wire import Verdict, encode, verdict_of
from tollkeeper.web.answers import (
    Answer,
    Style,
    bad_request_of,
    capacity_refusal_of,
    problem_of,
    raw_headers_of,
    status_of,
)
from tollkeeper.web.problems import CONTENT_TYPE, problem

RawHeader = tuple[bytes, bytes]

JSON: Final = (b"content-type", b"application/json")
PROBLEM: Final = (b"content-type", CONTENT_TYPE.encode("ascii"))
NOT_KEPT: Final = (b"cache-control", b"no-store")
RETRY_AFTER_SECONDS: Final = 1


class Reply(NamedTuple):
    """A whole response, but for what every response has."""

    status: int
    headers: list[RawHeader]
    body: bytes = b""


# Three times as fast as calling the class, which would do the same in Python.
_reply: Final = tuple.__new__


class Refusal(Exception):
    """A request that is answered with this, whatever it asked for."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        super().__init__(reply.status)


def data_reply(data: Any, status: int = 200) -> Reply:
    """JSON."""
    return Reply(status, [JSON, NOT_KEPT], encode(data))


def problem_reply(
    status: int, code: str, detail: str, headers: Sequence[RawHeader] = (), **details: Any
) -> Reply:
    """An error, in the words of RFC 9457."""
    members = problem(status, code, detail, details=details)
    return Reply(status, [*headers, PROBLEM, NOT_KEPT], encode(members))


def refused_reply(refused: Refused) -> Reply:
    """Of somebody who may not."""
    challenge = [(b"www-authenticate", refused.challenge.encode("ascii"))]
    headers = challenge if refused.status == 401 else []
    return problem_reply(refused.status, refused.code, refused.detail, headers)


def ruling_reply(ruling: CheckResult, now_ns: int, style: Style) -> Reply:
    """The answer to a check: the verdict, or the problem with the verdict's members in it."""
    headers = raw_headers_of(ruling, now_ns, style)
    if ruling[0].allowed:
        headers.append(JSON)
        return _reply(Reply, (200, headers, encode(verdict_of(ruling))))
    return _denied(ruling, now_ns, headers)


def _denied(ruling: CheckResult, now_ns: int, headers: list[RawHeader]) -> Reply:
    headers += (PROBLEM, NOT_KEPT)
    verdict = verdict_of(ruling)
    members = problem_of(ruling, now_ns)
    for name in Verdict.__struct_fields__:
        members[name] = getattr(verdict, name)
    return Reply(status_of(ruling), headers, encode(members))


def error_reply(error: Exception) -> Reply | None:
    """What an error of ours means to whoever asked; None: it is a defect."""
    if isinstance(error, Refusal):
        return error.reply
    if isinstance(error, CapacityError):
        return _of_answer(capacity_refusal_of(error))
    if isinstance(error, ConfigError):
        return _of_answer(bad_request_of(error))
    if isinstance(error, StoreError):
        wait = [(b"retry-after", b"%d" % RETRY_AFTER_SECONDS)]
        return problem_reply(503, "STORE_UNAVAILABLE", str(error), wait)
    return None


def _of_answer(answer: Answer) -> Reply:
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers
    ]
    return Reply(answer.status, headers, answer.body)
