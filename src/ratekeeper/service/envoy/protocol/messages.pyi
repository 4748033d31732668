# Generated from the .proto files beside it by tests/service/envoy/generate.py.
# ruff: noqa: A002, E501 - the names are Envoy's, and long
# fmt: off
from collections.abc import Iterable, Mapping, MutableMapping
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
QUOTA_SERVICE: Final[str]

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

class TokenBucket(Message):
    max_tokens: int
    tokens_per_fill: UInt32Value
    fill_interval: Duration
    def __init__(
        self,
        *,
        max_tokens: int | None = ...,
        tokens_per_fill: UInt32Value | Mapping[str, Any] | None = ...,
        fill_interval: Duration | Mapping[str, Any] | None = ...,
    ) -> None: ...

class RateLimitStrategy(Message):
    class RequestsPerTimeUnit(Message):
        requests_per_time_unit: int
        time_unit: int
        def __init__(
            self,
            *,
            requests_per_time_unit: int | None = ...,
            time_unit: int | None = ...,
        ) -> None: ...

    ALLOW_ALL: Final = 0
    DENY_ALL: Final = 1
    blanket_rule: int
    requests_per_time_unit: RateLimitStrategy.RequestsPerTimeUnit
    token_bucket: TokenBucket
    def __init__(
        self,
        *,
        blanket_rule: int | None = ...,
        requests_per_time_unit: RateLimitStrategy.RequestsPerTimeUnit | Mapping[str, Any] | None = ...,
        token_bucket: TokenBucket | Mapping[str, Any] | None = ...,
    ) -> None: ...

class RateLimitQuotaUsageReports(Message):
    class BucketQuotaUsage(Message):
        bucket_id: BucketId
        time_elapsed: Duration
        num_requests_allowed: int
        num_requests_denied: int
        def __init__(
            self,
            *,
            bucket_id: BucketId | Mapping[str, Any] | None = ...,
            time_elapsed: Duration | Mapping[str, Any] | None = ...,
            num_requests_allowed: int | None = ...,
            num_requests_denied: int | None = ...,
        ) -> None: ...

    domain: str
    bucket_quota_usages: RepeatedCompositeFieldContainer[RateLimitQuotaUsageReports.BucketQuotaUsage]
    def __init__(
        self,
        *,
        domain: str | None = ...,
        bucket_quota_usages: Iterable[RateLimitQuotaUsageReports.BucketQuotaUsage | Mapping[str, Any]] | None = ...,
    ) -> None: ...

class RateLimitQuotaResponse(Message):
    class BucketAction(Message):
        class QuotaAssignmentAction(Message):
            assignment_time_to_live: Duration
            rate_limit_strategy: RateLimitStrategy
            def __init__(
                self,
                *,
                assignment_time_to_live: Duration | Mapping[str, Any] | None = ...,
                rate_limit_strategy: RateLimitStrategy | Mapping[str, Any] | None = ...,
            ) -> None: ...

        class AbandonAction(Message):
            def __init__(
                self,
            ) -> None: ...

        bucket_id: BucketId
        quota_assignment_action: RateLimitQuotaResponse.BucketAction.QuotaAssignmentAction
        abandon_action: RateLimitQuotaResponse.BucketAction.AbandonAction
        def __init__(
            self,
            *,
            bucket_id: BucketId | Mapping[str, Any] | None = ...,
            quota_assignment_action: RateLimitQuotaResponse.BucketAction.QuotaAssignmentAction | Mapping[str, Any] | None = ...,
            abandon_action: RateLimitQuotaResponse.BucketAction.AbandonAction | Mapping[str, Any] | None = ...,
        ) -> None: ...

    bucket_action: RepeatedCompositeFieldContainer[RateLimitQuotaResponse.BucketAction]
    def __init__(
        self,
        *,
        bucket_action: Iterable[RateLimitQuotaResponse.BucketAction | Mapping[str, Any]] | None = ...,
    ) -> None: ...

class BucketId(Message):
    bucket: MutableMapping[str, str]
    def __init__(
        self,
        *,
        bucket: Mapping[str, str] | None = ...,
    ) -> None: ...
