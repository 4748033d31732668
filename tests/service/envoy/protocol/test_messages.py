"""The messages match Envoy's, are up to date, and do not conflict with other stubs."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from ratekeeper.service.envoy.protocol.messages import (
    POOL,
    RateLimitQuotaUsageReports,
    RateLimitRequest,
    RateLimitResponse,
)
from tests.envoy_process import envoy_path
from tests.service.envoy import generate

# Envoy's files for each of our files.
ENVOYS = {
    "headers.proto": "envoy/config/core/v3/base.proto",
    "units.proto": "envoy/type/v3/ratelimit_unit.proto",
    "descriptors.proto": "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
    "service.proto": "envoy/service/ratelimit/v3/rls.proto",
    "token_buckets.proto": "envoy/type/v3/token_bucket.proto",
    "strategies.proto": "envoy/type/v3/ratelimit_strategy.proto",
    "quotas.proto": "envoy/service/rate_limit_quota/v3/rlqs.proto",
}


@pytest.fixture(scope="module")
def protos() -> list[FileDescriptorProto]:
    """The .proto files, compiled now."""
    return generate.compiled()


@pytest.mark.parametrize("name", ["files.py", "messages.pyi"])
def test_what_is_generated_is_up_to_date(name: str, protos: list[FileDescriptorProto]) -> None:
    """If it differs: python -m tests.service.envoy.generate."""
    make = {"files.py": generate.python_of, "messages.pyi": generate.stub_of}[name]
    kept = (generate.SOURCE / generate.FOLDER / name).read_text(encoding="utf-8")
    assert kept == make(protos)


def _in_the_binary(name: str) -> FileDescriptorProto:
    """A compiled .proto file out of Envoy's own binary, which carries them all."""
    start = b"\x0a" + bytes([len(name)]) + name.encode()
    with envoy_path().open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        at = end = held.find(start)
        assert at >= 0, f"Envoy has no {name}"
        last = 0
        while True:
            tag, place = _varint(held, end)
            # Fields of a file are all of one kind, and come in order; what follows is another file.
            if tag & 7 != 2 or not last <= tag >> 3 <= 12:
                break
            last = tag >> 3
            length, place = _varint(held, place)
            end = place + length
        return FileDescriptorProto.FromString(held[at:end])


def _varint(held: mmap.mmap, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = held[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place


def _fields(messages: object, prefix: str) -> Iterator[tuple[str, int, int, str, int]]:
    """Each field of each message: name, number, type, of which message, and whether repeated."""
    for message in messages:  # type: ignore[attr-defined]  # a repeated field
        assert isinstance(message, DescriptorProto)
        name = f"{prefix}.{message.name}"
        for field in message.field:
            repeated = int(field.label == field.LABEL_REPEATED)
            yield f"{name}.{field.name}", field.number, field.type, field.type_name, repeated
        for enum in message.enum_type:
            for value in enum.value:
                yield f"{name}.{enum.name}.{value.name}", value.number, 0, "", 0
        yield from _fields(message.nested_type, name)


def _all(proto: FileDescriptorProto) -> set[tuple[str, int, int, str, int]]:
    enums = {(f"{proto.package}.{enum.name}.{value.name}", value.number, 0, "", 0)
             for enum in proto.enum_type for value in enum.value}  # fmt: skip
    methods = {(f"{proto.package}.{service.name}.{method.name}", 0, 0,
                f"{method.input_type} {method.output_type}", 0)
               for service in proto.service for method in service.method}  # fmt: skip
    return enums | methods | set(_fields(proto.message_type, proto.package))


@pytest.mark.parametrize("name", generate.PROTOS)
def test_names_numbers_and_types_are_those_of_the_real_envoy(
    name: str, protos: list[FileDescriptorProto]
) -> None:
    """Envoy has each of our messages, with the same package, name, number and type."""
    ours = _all(protos[generate.PROTOS.index(name)])
    assert len(ours) >= 3
    assert ours - _all(_in_the_binary(ENVOYS[name])) == set()


@pytest.mark.parametrize("name", ["service.proto", "quotas.proto"])
def test_nothing_of_a_service_is_missing(name: str, protos: list[FileDescriptorProto]) -> None:
    """Our file of the service has every field that Envoy sends."""
    ours = _all(protos[generate.PROTOS.index(name)])
    assert _all(_in_the_binary(ENVOYS[name])) == ours


IN_BOTH = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from ratekeeper.service.envoy.protocol import {first}
name = "envoy/service/ratelimit/v3/rls.proto"
theirs = descriptor_pb2.FileDescriptorProto(
    name=name, package="envoy.service.ratelimit.v3", syntax="proto3"
)
theirs.message_type.add(name="RateLimitRequest").field.add(
    name="domain", number=1, type=9, label=1
)
pool = descriptor_pool.Default()
pool.AddSerializedFile(theirs.SerializeToString())
found = message_factory.GetMessageClass(
    pool.FindMessageTypeByName("envoy.service.ratelimit.v3.RateLimitRequest")
)
from ratekeeper.service.envoy.protocol.messages import RateLimitRequest
assert found is not RateLimitRequest
assert RateLimitRequest.FromString(found(domain="a").SerializeToString()).domain == "a"
print("both")
"""


@pytest.mark.parametrize("first", ["messages", "files"])
def test_other_stubs_of_envoy_may_be_loaded_too(first: str) -> None:
    """They may come before or after ours: the names are the same, but the pools differ."""
    done = subprocess.run(
        [sys.executable, "-c", IN_BOTH.format(first=first)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("both\n", "")


def test_text_that_is_not_utf8_is_read_as_bytes() -> None:
    """Envoy forwards a client's header; an invalid byte must not fail the message."""
    body = RateLimitRequest(
        domain="shop", descriptors=[{"entries": [{"key": "k", "value": "VALUE"}]}]
    ).SerializeToString()
    read = RateLimitRequest.FromString(body.replace(b"VALUE", b"\xff\xfe\x00ab"))
    value: object = read.descriptors[0].entries[0].value
    assert value == b"\xff\xfe\x00ab"


def test_a_bucket_with_text_that_is_not_utf8_is_read() -> None:
    """A bucket has the values of clients' headers, and an invalid byte must not end the stream."""
    usage = {"bucket_id": {"bucket": {"name": "VALUE"}}, "num_requests_allowed": 2**63}
    sent = RateLimitQuotaUsageReports(domain="shop", bucket_quota_usages=[usage])
    body = sent.SerializeToString().replace(b"VALUE", b"\xff\xfe\x00ab")
    (read,) = RateLimitQuotaUsageReports.FromString(body).bucket_quota_usages
    value: object = read.bucket_id.bucket["name"]
    assert value == b"\xff\xfe\x00ab"
    assert read.num_requests_allowed == 2**63


def test_an_explicit_zero_is_distinguished() -> None:
    """0 spends nothing, and a missing number spends 1."""
    for descriptor, present in (({}, False), ({"hits_addend": {"value": 0}}, True)):
        body = RateLimitRequest(descriptors=[descriptor]).SerializeToString()
        assert RateLimitRequest.FromString(body).descriptors[0].HasField("hits_addend") is present


def test_the_pool_has_the_service() -> None:
    """Reflection finds the service and all its messages by name."""
    service = POOL.FindServiceByName("envoy.service.ratelimit.v3.RateLimitService")
    method = service.methods_by_name["ShouldRateLimit"]
    assert method.input_type is RateLimitRequest.DESCRIPTOR
    assert method.output_type is RateLimitResponse.DESCRIPTOR
