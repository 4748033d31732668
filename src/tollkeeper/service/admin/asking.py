"""How a request gets in: who asks, how much, in which words, and of which version.

In this order, and each before the next costs anything: the token is looked at before the body is
read, the body is counted while it is read, and JSON is taken strictly. What two readers could
understand differently (a name given twice, NaN, half of a surrogate pair) is refused.

Conditions are those of HTTP. `If-Match: "v12"` makes a change only if version 12 is the newest,
`If-None-Match: *` only if there is none yet; `If-None-Match: "v12"` on a GET asks for a newer one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, Final
from urllib.parse import unquote_to_bytes

from fastapi import Depends, Header, Query, Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tollkeeper.control.schema import REASON_LENGTH_MAX
from tollkeeper.core.errors import show
from tollkeeper.service.admin.models import NUMBER_MAX
from tollkeeper.service.admin.plane import Asked, Condition, InForce, Plane
from tollkeeper.service.admin.problems import NotModified, Refusal, refusal_of
from tollkeeper.service.http.tokens import Permission, TokenRejection

BODY_BYTES_MAX: Final = 5 * 2**20
# Longer than a check's: a document of megabytes may come over a slow line.
BODY_SECONDS_MAX: Final = 30.0
CONDITION_LENGTH_MAX: Final = 1_000
# What a role is called in the description of an operation.
ROLE: Final = "x-role"
# Set for the operations that take more than JSON, and see to it themselves.
ANY_CONTENT: Final = "x-any-content"

# What a condition looks like, for those who read the description.
_ETAGS: Final = r'^(\*|(W/)?"[^"]*"(, *(W/)?"[^"]*")*)$'
_FIRST: Final = "(And `If-None-Match: *`: only if there is none yet.)"
# In UTF-8 a character has up to four bytes, and each comes as a character of Latin-1.
REASON_BYTES_MAX: Final = 4 * REASON_LENGTH_MAX
_ETAG: Final = re.compile(r'\s*(W/)?"([^"]*)"\s*')
_OURS: Final = re.compile(r"v(0|[1-9][0-9]{0,9})")
_YAML: Final = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class AdminRoute(APIRoute):
    """A route that only those may use who have a token for it."""

    def get_route_handler(self) -> _Handler:
        """The handler of FastAPI's, behind ours."""
        handle = super().get_route_handler()
        extra = self.openapi_extra or {}
        needed: Permission = extra.get(ROLE, "read" if self.methods == {"GET"} else "admin")
        wants_json = self.body_field is not None and not extra.get(ANY_CONTENT)

        async def guarded(request: Request) -> Response:
            plane = plane_of(request)
            found = plane.node.tokens.permitted(request.headers.get("authorization"), needed)
            if isinstance(found, TokenRejection):
                raise refusal_of(found)
            request.state.token = found
            _check_url(request)
            if wants_json:
                _check_json_type(request)
            response = await handle(_Bounded(request.scope, request.receive))
            response.headers.setdefault("Cache-Control", "no-cache")
            return response

        return guarded


class _Bounded(Request):
    """A request whose body has a bound, and whose JSON is taken strictly."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def json(self) -> Any:
        return strict_json(await self.body())

    async def _read(self) -> bytes:
        length = self.headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > BODY_BYTES_MAX:
            raise _too_large()
        chunks: list[bytes] = []
        count = 0
        try:
            async with asyncio.timeout(BODY_SECONDS_MAX):
                async for chunk in self.stream():
                    count += len(chunk)
                    if count > BODY_BYTES_MAX:
                        raise _too_large()
                    chunks.append(chunk)
        except TimeoutError:
            detail = f"the body did not arrive in {BODY_SECONDS_MAX:g} s; send it in one piece"
            raise Refusal(408, "BODY_TOO_SLOW", detail, {"Connection": "close"}) from None
        except ClientDisconnect:
            detail = "the body ended before its end; send all of it"
            raise Refusal(400, "BODY_INCOMPLETE", detail, {"Connection": "close"}) from None
        return b"".join(chunks)


def _too_large() -> Refusal:
    return Refusal(413, "TOO_LARGE", f"a body has at most {BODY_BYTES_MAX:,} bytes here")


def _check_url(request: Request) -> None:
    """Refuse what is not UTF-8: whoever decodes it for us would put something in its place."""
    parts = (
        ("path", request.scope.get("raw_path") or b""),
        ("query", request.scope.get("query_string") or b""),
    )
    for name, raw in parts:
        try:
            unquote_to_bytes(raw).decode()
        except UnicodeDecodeError as error:
            raise Refusal(
                400, "NOT_UTF8", f"the URL's {name} is not UTF-8 at byte {error.start + 1}"
            ) from None


def _check_json_type(request: Request) -> None:
    kind = _media_type(request)
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise Refusal(
        415, "UNSUPPORTED_MEDIA_TYPE", f"{_said(kind)}; send it as Content-Type: application/json"
    )


def _said(kind: str) -> str:
    return f"a body of {show(kind)} is not understood here" if kind else "the body has no type"


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def strict_json(raw: bytes) -> Any:
    """What a JSON text says. Raises Refusal (400), with the place.

    >>> strict_json(b'{"user": "42"}')
    {'user': '42'}
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, "NOT_UTF8", f"the body is not UTF-8 at byte {error.start + 1}") from None
    try:
        data = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
        # Escapes may make half of a surrogate pair, which is no text.
        json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise Refusal(400, "INVALID_JSON", "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise Refusal(
            400, "INVALID_JSON", "the body holds half of a surrogate pair, which is no text"
        ) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise Refusal(
            400, "INVALID_JSON", f"the body is not JSON at {place}: {error.msg}"
        ) from None
    except ValueError as error:  # of ours, or of Python's for a number of 5,000 digits
        raise Refusal(400, "INVALID_JSON", f"the body is not JSON: {str(error)[:200]}") from None
    return data


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{show(name)} is given twice in one object")
        found[name] = value
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number in JSON")


# ------------------------------------------------------------------------------------ documents


async def text_of(request: Request) -> str:
    """The body as text: a document in YAML or JSON. Raises Refusal."""
    kind = _media_type(request)
    if kind and kind not in _YAML and kind != "application/json":
        raise Refusal(
            415,
            "UNSUPPORTED_MEDIA_TYPE",
            f"{_said(kind)}; send it as Content-Type: application/yaml or application/json",
        )
    raw = await request.body()
    if not raw:
        raise Refusal(422, "INVALID_DOCUMENT", "the document is empty; send it as the body")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, "NOT_UTF8", f"the body is not UTF-8 at byte {error.start + 1}") from None


def wants_yaml(accept: str) -> bool:
    """Is YAML asked for rather than JSON?

    >>> wants_yaml("application/yaml"), wants_yaml("*/*"), wants_yaml("text/yaml;q=0.1, */*")
    (True, False, False)
    """
    yaml, json_ = -1.0, -1.0
    for part in accept[:CONDITION_LENGTH_MAX].lower().split(","):
        kind, _, parameters = part.strip().partition(";")
        weight = _weight(parameters)
        if kind.strip() in _YAML:
            yaml = max(yaml, weight)
        elif kind.strip() in {"application/json", "application/*", "*/*"}:
            json_ = max(json_, weight)
    return yaml > 0 and yaml >= json_


def _weight(parameters: str) -> float:
    for each in parameters.split(";"):
        name, _, value = each.strip().partition("=")
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


# ----------------------------------------------------------------------------------- conditions


def tags_of(header: str, *, weak: bool = False) -> list[str] | None:
    """The entity tags of a condition, without their quotes; None: `*`. Raises Refusal.

    Only the strong ones, or the weak ones too: those say that two texts mean the same.

    >>> tags_of('"v1", W/"v2", "v3"'), tags_of("*")
    (['v1', 'v3'], None)
    """
    if header.strip() == "*":
        return None
    found: list[str] = []
    position = 0
    while position < len(header) or not position:
        tag = _ETAG.match(header, position)
        end = tag.end() if tag else position
        if (
            tag is None
            or len(header) > CONDITION_LENGTH_MAX
            or header[end : end + 1] not in {"", ","}
        ):
            raise Refusal(
                400, "INVALID_CONDITION", f'{show(header)} is not a list of ETags such as "v12"'
            )
        if weak or not tag[1]:
            found.append(tag[2])
        position = end + 1
    return found


def condition_of(if_match: str | None, if_none_match: str | None) -> Condition | None:
    """What a change is to depend on; None: on nothing. Raises Refusal."""
    if if_none_match is not None:
        if if_match is not None or tags_of(if_none_match) is not None:
            raise Refusal(
                400,
                "INVALID_CONDITION",
                "a change takes If-Match, or If-None-Match: * if there is to be no version yet",
            )
        return Condition(frozenset({0}))
    if if_match is None:
        return None
    tags = tags_of(if_match)
    if tags is None:
        return Condition(any_version=True)
    ours = (int(tag[1]) for tag in map(_OURS.fullmatch, tags) if tag)
    return Condition(frozenset(number for number in ours if number <= NUMBER_MAX))


def refuse_known(etag: str, if_none_match: str | None) -> None:
    """Raise NotModified for one who has this version already.

    Weak tags count too, as HTTP says for a GET.
    """
    if if_none_match is None:
        return
    tags = tags_of(if_none_match, weak=True)
    if tags is None or etag.strip('"') in tags:
        raise NotModified(etag)


def newer(found: InForce, if_none_match: str | None) -> InForce:
    """The rules, if the one who asks has another version. Raises NotModified."""
    refuse_known(found.etag, if_none_match)
    return found


# --------------------------------------------------------------------------------- dependencies


def plane_of(request: Request) -> Plane:
    """What the application of this request asks."""
    plane: Plane = request.app.state.plane
    return plane


def _asked(
    request: Request,
    force: Annotated[
        bool, Query(description="Make the change also if it is unsafe; the audit says so.")
    ] = False,
    if_match: Annotated[
        str | None,
        Header(
            description=f"Only if this is the newest version. {_FIRST}",
            examples=['"v12"', "*"],
            json_schema_extra={"pattern": _ETAGS},
        ),
    ] = None,
    if_none_match: Annotated[str | None, Header(include_in_schema=False)] = None,
    x_reason: Annotated[
        str | None,
        Header(
            description="Why, for the audit, if the body does not say it; in UTF-8.",
            max_length=REASON_BYTES_MAX,
            json_schema_extra={"maxLength": REASON_LENGTH_MAX},
        ),
    ] = None,
) -> Asked:
    reason = x_reason or ""
    with suppress(UnicodeError):
        # Headers come as Latin-1, and people type UTF-8.
        reason = reason.encode("latin-1").decode()
    return Asked(request.state.token.name, reason, force, condition_of(if_match, if_none_match))


PlaneOf = Annotated[Plane, Depends(plane_of)]
AskedOf = Annotated[Asked, Depends(_asked)]
IfNoneMatch = Annotated[
    str | None,
    Header(
        description="304 if this is still the newest version.",
        examples=['"v12"'],
        json_schema_extra={"pattern": _ETAGS},
    ),
]
