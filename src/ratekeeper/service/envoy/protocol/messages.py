"""The messages as classes, in a pool of descriptors of their own.

A process has one default pool, in which each name may be defined once. An application that has
Envoy's own stubs loaded (the package xds-protos, a control plane in Python) has the same names
there. A pool of our own keeps the two sets of messages apart.
"""

from __future__ import annotations

from typing import Any, Final

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.envoy.protocol.files import FILES

try:
    from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
except ImportError as error:
    raise ConfigError(
        f"Envoy's protocol needs protobuf: pip install 'ratekeeper[server]' ({error})"
    ) from error

POOL: Final = DescriptorPool()
SERVICE: Final = "envoy.service.ratelimit.v3.RateLimitService"
QUOTA_SERVICE: Final = "envoy.service.rate_limit_quota.v3.RateLimitQuotaService"

for _known in (duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2):
    POOL.AddSerializedFile(_known.DESCRIPTOR.serialized_pb)
for _file in FILES:
    POOL.AddSerializedFile(bytes.fromhex(_file))


def _message(name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(f"envoy.{name}"))


HeaderValue = _message("config.core.v3.HeaderValue")
RateLimitDescriptor = _message("extensions.common.ratelimit.v3.RateLimitDescriptor")
RateLimitRequest = _message("service.ratelimit.v3.RateLimitRequest")
RateLimitResponse = _message("service.ratelimit.v3.RateLimitResponse")
TokenBucket = _message("type.v3.TokenBucket")
RateLimitStrategy = _message("type.v3.RateLimitStrategy")
RateLimitQuotaUsageReports = _message("service.rate_limit_quota.v3.RateLimitQuotaUsageReports")
RateLimitQuotaResponse = _message("service.rate_limit_quota.v3.RateLimitQuotaResponse")
BucketId = _message("service.rate_limit_quota.v3.BucketId")
