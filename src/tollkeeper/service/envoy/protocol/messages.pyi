# Generated from the .proto files beside it by tests/service/envoy/generate.py.
# ruff: noqa: A002 - the names are Envoy's
from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import UInt32Value, UInt64Value

POOL: Final[DescriptorPool]
SERVICE: Final[str]

class HeaderValue(Message):
    key: str
    value: str
    raw_value: bytes
    def __init__(
        self,
        *,
        key: str | None = ...,
        value: str | None = ...,
        raw_value: bytes | None = ...,
    ) -> None: ...

class RateLimitDescriptor(Message):
    class Entry(Message):
        key: str
        value: str
        def __init__(
            self,
            *,
            key: str | None = ...,
            value: str | None = ...,
        ) -> None: ...

    class RateLimitOverride(Message):
        requests_per_unit: int
        unit: int
        unit_multiplier: UInt32Value
        def __init__(
            self,
            *,
            requests_per_unit: int | None = ...,
            unit: int | None = ...,
            unit_multiplier: UInt32Value | Mapping[str, Any] | None = ...,
        ) -> None: ...

    entries: RepeatedCompositeFieldContainer[RateLimitDescriptor.Entry]
    limit: RateLimitDescriptor.RateLimitOverride
    hits_addend: UInt64Value
    is_negative_hits: bool
    def __init__(
        self,
        *,
        entries: Iterable[RateLimitDescriptor.Entry | Mapping[str, Any]] | None = ...,
        limit: RateLimitDescriptor.RateLimitOverride | Mapping[str, Any] | None = ...,
        hits_addend: UInt64Value | Mapping[str, Any] | None = ...,
        is_negative_hits: bool | None = ...,
    ) -> None: ...

class RateLimitRequest(Message):
    domain: str
    descriptors: RepeatedCompositeFieldContainer[RateLimitDescriptor]
    hits_addend: int
    def __init__(
        self,
        *,
        domain: str | None = ...,
        descriptors: Iterable[RateLimitDescriptor | Mapping[str, Any]] | None = ...,
        hits_addend: int | None = ...,
    ) -> None: ...

class RateLimitResponse(Message):
    class RateLimit(Message):
        UNKNOWN: Final = 0
        SECOND: Final = 1
        MINUTE: Final = 2
        HOUR: Final = 3
        DAY: Final = 4
        MONTH: Final = 5
        YEAR: Final = 6
        WEEK: Final = 7
        requests_per_unit: int
        unit: int
        name: str
        unit_multiplier: UInt32Value
        def __init__(
            self,
            *,
            requests_per_unit: int | None = ...,
            unit: int | None = ...,
            name: str | None = ...,
            unit_multiplier: UInt32Value | Mapping[str, Any] | None = ...,
        ) -> None: ...

    class Quota(Message):
        requests: int
        valid_until: Timestamp
        id: str
        def __init__(
            self,
            *,
            requests: int | None = ...,
            valid_until: Timestamp | Mapping[str, Any] | None = ...,
            id: str | None = ...,
        ) -> None: ...

    class DescriptorStatus(Message):
        code: int
        current_limit: RateLimitResponse.RateLimit
        limit_remaining: int
        duration_until_reset: Duration
        quota: RateLimitResponse.Quota
        def __init__(
            self,
            *,
            code: int | None = ...,
            current_limit: RateLimitResponse.RateLimit | Mapping[str, Any] | None = ...,
            limit_remaining: int | None = ...,
            duration_until_reset: Duration | Mapping[str, Any] | None = ...,
            quota: RateLimitResponse.Quota | Mapping[str, Any] | None = ...,
        ) -> None: ...

    UNKNOWN: Final = 0
    OK: Final = 1
    OVER_LIMIT: Final = 2
    overall_code: int
    statuses: RepeatedCompositeFieldContainer[RateLimitResponse.DescriptorStatus]
    response_headers_to_add: RepeatedCompositeFieldContainer[HeaderValue]
    request_headers_to_add: RepeatedCompositeFieldContainer[HeaderValue]
    raw_body: bytes
    dynamic_metadata: Struct
    quota: RateLimitResponse.Quota
    def __init__(
        self,
        *,
        overall_code: int | None = ...,
        statuses: Iterable[RateLimitResponse.DescriptorStatus | Mapping[str, Any]] | None = ...,
        response_headers_to_add: Iterable[HeaderValue | Mapping[str, Any]] | None = ...,
        request_headers_to_add: Iterable[HeaderValue | Mapping[str, Any]] | None = ...,
        raw_body: bytes | None = ...,
        dynamic_metadata: Struct | Mapping[str, Any] | None = ...,
        quota: RateLimitResponse.Quota | Mapping[str, Any] | None = ...,
    ) -> None: ...
