"""The gRPC server on a real socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ratekeeper import Request
from ratekeeper.core.errors import ConfigError
from ratekeeper.service.envoy.protocol.messages import (
    QUOTA_SERVICE,
    SERVICE,
    RateLimitQuotaResponse,
)
from ratekeeper.service.envoy.server import METHOD, QUOTA_METHOD, start
from ratekeeper.service.grpc.calls import Bounds, TlsFiles
from ratekeeper.service.grpc.server import Implementation
from tests.redis_servers.certificates import make_certificates
from tests.service.envoy.client import (
    FakeContext,
    Serving,
    caller_on,
    codes,
    entries,
    grpc_client,
    headers,
    serving,
)
from tests.service.envoy.streams import actions_of, report_of

RULES = {"version": 1, "rules": [
    {"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["20/hour"]},
    {"id": "slow", "match": {"tenant": "*"}, "by": ["tenant"],
     "limits": [{"limit": 1, "per": "1500ms", "algorithm": "leaky_bucket", "capacity": 4}]},
]}  # fmt: skip
ANN = entries(("user", "ann"))


async def test_limits_are_exact_for_concurrent_calls() -> None:
    """Of 100 concurrent calls, 20 pass."""
    async with serving(RULES) as server, grpc_client(server.target) as ask:
        found = await asyncio.gather(*[ask(ANN) for _ in range(100)])
        assert sorted(codes(each)[0] for each in found) == ["OK"] * 20 + ["OVER_LIMIT"] * 80


async def test_the_health_service() -> None:
    """SERVING for the server and the service; NOT_SERVING from the start of a shutdown."""
    async with serving(RULES) as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            found = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.handle.stop(0.2))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping


async def test_a_draining_server_still_replies() -> None:
    """Health checks fail, so Envoy goes elsewhere; calls still get replies."""
    async with serving(RULES) as server, grpc.aio.insecure_channel(server.target) as channel:
        await server.handle.drain()
        stub = health_pb2_grpc.HealthStub(channel)
        found = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert codes(await caller_on(channel)(ANN))[0] == "OK"


async def test_reflection_lists_all_services() -> None:
    """A client without stubs finds the services and their files."""
    ask = reflection_pb2.ServerReflectionRequest
    wanted = [ask(list_services=""), ask(file_containing_symbol=SERVICE),
              ask(file_containing_symbol="grpc.health.v1.Health")]  # fmt: skip
    async with serving(RULES) as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, ours, health = [
            each async for each in stub.ServerReflectionInfo(iter(wanted), timeout=10)
        ]
    names = {each.name for each in listed.list_services_response.service}
    grpcs = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert names == {SERVICE, QUOTA_SERVICE, *grpcs}
    files = [FileDescriptorProto.FromString(each)
             for each in ours.file_descriptor_response.file_descriptor_proto]  # fmt: skip
    assert [each.service[0].method[0].name for each in files if each.service] == [METHOD]
    known = {each.name for each in files}
    assert {name for each in files for name in each.dependency} <= known
    assert health.file_descriptor_response.file_descriptor_proto


async def test_tls(tmp_path: Path) -> None:
    """A client with the authority's certificate gets a reply; one without TLS does not."""
    made = make_certificates(tmp_path)
    trusted = grpc.ssl_channel_credentials(made.ca_path.read_bytes())
    async with serving(RULES, tls=TlsFiles(made.server_cert_path, made.server_key_path)) as server:
        async with grpc.aio.secure_channel(server.target, trusted) as channel:
            assert codes(await caller_on(channel)(ANN))[0] == "OK"
        async with grpc_client(server.target) as ask:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(ANN, timeout=2)


async def test_tls_can_require_client_certificates(tmp_path: Path) -> None:
    """A client without a certificate of the authority is rejected."""
    made = make_certificates(tmp_path)
    authority = made.ca_path.read_bytes()
    without_certificate = grpc.ssl_channel_credentials(authority)
    with_certificate = grpc.ssl_channel_credentials(
        authority, made.client_key_path.read_bytes(), made.client_cert_path.read_bytes()
    )
    tls = TlsFiles(made.server_cert_path, made.server_key_path, made.ca_path)
    async with serving(RULES, tls=tls) as server:
        async with grpc.aio.secure_channel(server.target, with_certificate) as channel:
            assert codes(await caller_on(channel)(ANN))[0] == "OK"
        async with grpc.aio.secure_channel(server.target, without_certificate) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await caller_on(channel)(ANN, timeout=2)


async def test_a_message_has_at_most_one_mebibyte() -> None:
    """A larger one is rejected before it is read."""
    async with serving(RULES) as server, grpc_client(server.target) as ask:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(entries(("user", "x" * Bounds().message_bytes)))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_connection_that_breaks_the_protocol_is_counted() -> None:
    """The operator sees clients that do not speak HTTP/2."""
    async with serving(RULES) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.handle.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await server.handle.stop(0)
        assert server.context.counters.grpc_resets == {"violation": 1}


async def test_calls_in_flight_are_bounded() -> None:
    """One more call fails at once, and Envoy decides; the one in flight gets its reply."""
    slow = entries(("tenant", "acme"))
    async with serving(RULES, bounds=Bounds(calls=1)) as server, grpc_client(server.target) as ask:
        await ask(slow)
        held = asyncio.ensure_future(ask(slow))
        await until_held(server)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(ANN)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert codes(await held)[0] == "OK"


async def until_held(server: Serving) -> None:
    """Wait until the second call of the slow rule's tenant is held."""
    acme = Request(tenant="acme")
    async with asyncio.timeout(10):
        while (await server.limiter.peek(acme)).remaining > 2:  # noqa: ASYNC110 - it is a server's
            await asyncio.sleep(0.005)


async def test_an_error_reaches_the_caller_as_a_status() -> None:
    """The details say what is wrong."""
    async with serving(RULES) as server, grpc_client(server.target) as ask:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(ANN, domain="")
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "domain" in str(error.value.details())


async def test_a_call_in_flight_ends_before_the_server() -> None:
    """A shutdown waits for held calls, as long as its grace period permits."""
    slow = entries(("tenant", "acme"))
    async with serving(RULES) as server, grpc_client(server.target) as ask:
        assert codes(await ask(slow))[0] == "OK"
        held = asyncio.ensure_future(ask(slow))
        await until_held(server)
        stopping = asyncio.create_task(server.handle.stop(10))
        assert codes(await held)[0] == "OK"
        await stopping


async def test_workers_share_a_port() -> None:
    """Two servers listen on one address, as the workers of a machine do."""
    async with serving(RULES) as first:
        second = await start(FakeContext(first.limiter), first.target)
        try:
            assert second.port == first.handle.port
            async with grpc_client(first.target) as ask:
                assert codes(await ask(ANN))[0] == "OK"
        finally:
            await second.stop(0)


@pytest.mark.parametrize(
    "address",
    ["192.0.2.1:0", "nowhere.invalid:80", "", "127.0.0.1", "127.0.0.1:99999", ":80", "a:b"],
)
async def test_an_invalid_address_is_an_error(address: str) -> None:
    """The error names it, and shows a valid one."""
    async with serving(RULES) as server:
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8081"):
            await start(FakeContext(server.limiter), address)


async def test_a_missing_certificate_is_an_error(tmp_path: Path) -> None:
    """The error names the file."""
    tls = TlsFiles(tmp_path / "absent.pem", tmp_path / "absent.key")
    with pytest.raises(ConfigError, match=r"absent\.pem cannot be read"):
        async with serving(RULES, tls=tls):
            pass


WITHOUT = """
import sys
sys.modules["grpc_health"] = None
try:
    import ratekeeper.service.envoy.server
except ValueError as error:
    print(type(error).__name__, error)
"""


def test_without_the_packages_the_error_names_the_extra() -> None:
    """A base installation has no gRPC; the error says what to install."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("ConfigError")
    assert "pip install 'ratekeeper[server]'" in done.stdout


async def test_the_node_that_decided_is_named() -> None:
    """On allowed requests and on denials."""
    rules = {"version": 1, "rules": [{"id": "api", "by": ["user"], "limits": ["1/hour"]}]}
    async with serving(rules) as server, grpc_client(server.target) as ask:
        found = [await ask(ANN) for _ in range(2)]
        assert [codes(each)[0] for each in found] == ["OK", "OVER_LIMIT"]
        assert {headers(each)["x-ratekeeper-node"] for each in found} == {"test-1"}


def quota_stream(channel: Any) -> Any:
    """Open a stream of quotas on which bytes are sent."""
    return channel.stream_stream(
        f"/{QUOTA_SERVICE}/{QUOTA_METHOD}",
        response_deserializer=RateLimitQuotaResponse.FromString,
    )(timeout=30)


@pytest.mark.parametrize("on", ["libnghttp2", "grpcio"])
async def test_streams_of_quotas(on: Implementation) -> None:
    """Each report is answered. One that cannot be read, or is too long, ends the stream."""
    report = report_of(({"tenant": "acme"}, 1, 0)).SerializeToString()
    ends = {b"\xff\xff": "INVALID_ARGUMENT", bytes(5_000): "RESOURCE_EXHAUSTED"}
    bounds = Bounds(message_bytes=1_000, streamed_bytes=4_000)
    async with (
        serving(RULES, bounds=bounds, on=on) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        for last, code in ends.items():
            stream = quota_stream(channel)
            for _ in range(2):
                await stream.write(report)
                assert actions_of(await stream.read()) == [({"tenant": "acme"}, "allow all")]
            await stream.write(last)
            assert (await stream.code()).name == code
        assert server.context.counters.grpc_requests["INVALID_ARGUMENT"] == 1


@pytest.mark.parametrize("on", ["libnghttp2", "grpcio"])
async def test_a_server_that_stops_ends_streams_of_quotas_at_once(on: Implementation) -> None:
    """The Envoys connect to another worker; the grace is for calls that have an end."""
    async with (
        serving(RULES, on=on) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stream = quota_stream(channel)
        await stream.write(report_of(({"tenant": "acme"}, 1, 0)).SerializeToString())
        await stream.read()
        await asyncio.wait_for(server.handle.stop(grace_s=3_600), 30)
        assert (await stream.code()).name == "OK"
