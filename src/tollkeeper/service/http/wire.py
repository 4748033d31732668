"""The JSON of checks: read into a Request, strictly, and written from a ruling.

Strictly means: a field that is not known, a number where text belongs, text with a NUL in it, bytes
that are not UTF-8 and objects nested without end are all refused, with the place. A field that was
misspelt and silently dropped would be a limit that silently does not apply.

msgspec reads and writes in C. A Request is put together slot by slot: its own constructor, which
checks what was just checked here, takes four times as long, and one is made for every check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import REQUEST_FIELDS, UNITS_MAX, CheckResult, Limit, Request
from tollkeeper.service.http.clients import counted_address
from tollkeeper.service.http.node import BATCH_CHECKS_MAX

ATTRIBUTES_MAX: Final = 64
QUERY_BYTES_MAX: Final = 16_384
TTL_SECONDS_MAX: Final = 366 * 86_400
_QUERY_FIELDS_MAX: Final = ATTRIBUTES_MAX + len(REQUEST_FIELDS)
_ATTRIBUTE: Final = "attributes."

_Attributes = Annotated[dict[str, str], msgspec.Meta(max_length=ATTRIBUTES_MAX)]
_Units = Annotated[int, msgspec.Meta(ge=0, le=UNITS_MAX)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=UNITS_MAX)]

# Nobody writes to it: requests that have no attributes share it.
_NO_ATTRIBUTES: Final[dict[str, str]] = {}


class _Fields(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A request's fields, flat."""

    user: str | None = None
    api_key: str | None = None
    ip: str | None = None
    tenant: str | None = None
    tier: str | None = None
    endpoint: str | None = None
    method: str | None = None
    attributes: _Attributes = msgspec.field(default_factory=dict)

    def request(self) -> Request:
        """The request that they say."""
        return request_of(self)


class CheckBody(_Fields, forbid_unknown_fields=True, gc=False):
    """Of POST /v1/check."""

    cost: _Units = 1


class SettleBody(_Fields, forbid_unknown_fields=True, kw_only=True):
    """Of POST /v1/settle."""

    reserved: _Units
    actual: _Units


class GrantBody(_Fields, forbid_unknown_fields=True, kw_only=True):
    """Of POST /v1/quota/grant."""

    units: _Positive
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=TTL_SECONDS_MAX)] | None = None


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of POST /v1/check/batch."""

    checks: Annotated[list[CheckBody], msgspec.Meta(min_length=1, max_length=BATCH_CHECKS_MAX)]
    atomic: bool = False


class Verdict(msgspec.Struct, gc=False):
    """What is answered to a check. Null: there is no such number, or nobody knows it."""

    allowed: bool
    kind: str
    rule: str
    limit: int | None
    remaining: int | None
    retry_after: float | None
    reset_after: float | None
    delay: float
    degraded: bool
    shadow_denied: tuple[str, ...]


# ── Requests ───────────────────────────────────────────────────────────────────────────────────

# What sets each slot of a frozen value.
_PUT: Final = tuple(Request.__dict__[name].__set__ for name in (*REQUEST_FIELDS, "attributes"))
_user, _api_key, _ip, _tenant, _tier, _endpoint, _method, _attributes = _PUT
_new: Final = Request.__new__


def request_of(fields: _Fields) -> Request:
    """The request that these fields say."""
    request = _new(Request)
    _user(request, fields.user)
    _api_key(request, fields.api_key)
    ip = fields.ip
    _ip(request, ip if ip is None or ":" not in ip else counted_address(ip))
    _tenant(request, fields.tenant)
    _tier(request, fields.tier)
    _endpoint(request, fields.endpoint)
    _method(request, fields.method)
    _attributes(request, fields.attributes or _NO_ATTRIBUTES)
    return request


Body = TypeVar("Body")


def reader_of(kind: type[Body]) -> Callable[[bytes], Body]:
    """What reads a body of this kind. It raises ConfigError, with the place.

    >>> reader_of(CheckBody)(b'{"usr": "42"}')
    Traceback (most recent call last):
    ...
    tollkeeper.core.errors.ConfigError: the body: Object contains unknown field `usr`
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> Body:
        try:
            found = decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"the body: {_wrong(error, body)}") from None
        # A NUL can only have come as this escape: as it is, it is not JSON.
        if b"\\u0000" in body:
            _refuse_nul(msgspec.to_builtins(found), "$")
        return found

    return read


def _wrong(error: Exception, body: bytes) -> str:
    if isinstance(error, UnicodeDecodeError):
        try:
            body.decode()  # the error's own place is counted from the beginning of a string
        except UnicodeDecodeError as found:
            return f"not UTF-8 (byte {found.start})"
    if isinstance(error, RecursionError):
        return "nested too deeply; a request's fields are text"
    return str(error)


def _refuse_nul(value: Any, place: str) -> None:
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"the body: text with a NUL character in it - at `{place}`")
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        for name in value:
            _refuse_nul(name, f"{place}: a name")
        inside = ((f"{place}.{name}", each) for name, each in value.items())
    elif isinstance(value, list):
        inside = ((f"{place}[{number}]", each) for number, each in enumerate(value))
    for where, each in inside:
        _refuse_nul(each, where)


def request_of_query(query: bytes) -> Request:
    """The request that a query says: `user=42&attributes.region=eu`. Raises ConfigError."""
    fields: dict[str, str] = {}
    attributes: dict[str, str] = {}
    for name, value in _pairs(query):
        if name in REQUEST_FIELDS:
            into, field = fields, name
        elif name.startswith(_ATTRIBUTE) and name != _ATTRIBUTE:
            into, field = attributes, name.removeprefix(_ATTRIBUTE)
        else:
            known = ", ".join(REQUEST_FIELDS)
            raise ConfigError(
                f"the query has a field {show(name)}, which is not known; there are {known}, and "
                f"attributes as attributes.NAME"
            )
        if field in into:
            raise ConfigError(f"the query has {show(name)} twice; give it once")
        if "\0" in value or "\0" in field:
            raise ConfigError(f"the query: {show(name)} has a NUL character in it")
        into[field] = counted_address(value) if name == "ip" else value
    return Request(**fields, attributes=attributes)


def _pairs(query: bytes) -> list[tuple[str, str]]:
    if len(query) > QUERY_BYTES_MAX:
        raise ConfigError(f"the query has more than {QUERY_BYTES_MAX:,} bytes")
    try:
        return parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_QUERY_FIELDS_MAX,
        )
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the query is not UTF-8, percent-encoded, at byte {error.start}"
        ) from None
    except ValueError:
        raise ConfigError(f"the query has more than {_QUERY_FIELDS_MAX} fields") from None


# ── Answers ────────────────────────────────────────────────────────────────────────────────────

encode: Final = msgspec.json.Encoder().encode


def verdict_of(ruling: CheckResult) -> Verdict:
    """What a ruling says, for a program."""
    decision, _, kind, shadow_denied, _ = ruling
    if kind == "limited" and not decision.degraded:
        return Verdict(
            decision.allowed,
            kind,
            decision.rule,
            decision.limit,
            decision.remaining,
            decision.retry_after,
            decision.reset_after,
            decision.delay,
            False,
            shadow_denied,
        )
    # Without limits there are no numbers; without a store nobody knows them.
    limits = kind in {"limited", "unavailable"}
    return Verdict(
        allowed=decision.allowed,
        kind=kind,
        rule=decision.rule if limits else "",
        limit=decision.limit if limits else None,
        remaining=None,
        retry_after=None if kind == "blocked" else decision.retry_after,
        reset_after=None,
        delay=0.0,
        degraded=decision.degraded,
        shadow_denied=shadow_denied,
    )


def limit_data(limit: Limit) -> dict[str, Any]:
    """The numbers of a limit."""
    return {
        "policy": str(limit),
        "name": limit.name,
        "algorithm": limit.algorithm,
        "units": limit.limit,
        "window_seconds": limit.window,
        "limit": limit.capacity,
    }
