"""A real `ratekeeper serve` with malformed requests, tokens, idle connections and TLS."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from typer.testing import CliRunner

from ratekeeper.cli.main import app
from ratekeeper.service.http.tokens import create_token, remove_token
from tests.redis_servers.certificates import make_certificates
from tests.redis_servers.waiting import until
from tests.service.envoy.client import caller_on, codes, entries
from tests.service_process import ASK_SECONDS_MAX, RULES, ServiceProcess, run_to_end
from tests.web.test_claims import RSA_KEY, Provider, jwk

OTHER_KEY = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    """Yield a service for all tests that do not change it."""
    with ServiceProcess(RULES, "--access-log") as running:
        yield running


# ── Without a token file ─────────────────────────────────────────────────────────────────────────


def test_the_fleet_needs_no_token_without_a_token_file(service: ServiceProcess) -> None:
    """The command shows this node. The rest of the admin API still needs a token."""
    done = CliRunner().invoke(app, ["fleet", "--url", service.url])
    assert done.exit_code == 0, done.output
    assert "this node" in done.output
    assert service.ask("GET", "/v1/admin/rules", None, {}).status == 401


# ── Malformed requests ───────────────────────────────────────────────────────────────────────────

DEEP = b'{"attributes":' + b'{"a":' * 20_000
BODIES: list[tuple[str, bytes, int, str]] = [
    ("NUL", b'{"user":"a\0b"}', 400, "column 11"),
    ("NUL, escaped", b'{"user":"a\\u0000b"}', 400, "the body: user: the text has a NUL character"),
    ("a megabyte", b'{"user":"' + b"x" * 2**20 + b'"}', 413, "65,536 bytes"),
    ("five megabytes", b" " * (5 * 2**20), 413, "65,536 bytes"),
    ("not UTF-8", b'{"user":"\xff\xfe"}', 400, "not UTF-8 at byte 10"),
    ("nested", DEEP, 413, "65,536 bytes"),
    ("nested less", DEEP[:60_000], 400, "the body"),
    ("not JSON", b"user=42", 400, "is not JSON at line 1, column 1"),
    ("nothing", b"", 400, "line 1, column 1"),
    ("another field", b'{"usr":"42"}', 400, 'unknown field "usr"; did you mean "user"?'),
    ("a key too long", b'{"user":"' + b"x" * 2_000 + b'"}', 400, "512"),
    ("too large a number", b'{"cost":' + b"9" * 5_000 + b"}", 400, "the body"),
]


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [each[1:] for each in BODIES],
    ids=[each[0] for each in BODIES],
)
def test_an_invalid_body_is_4xx_with_a_reason(
    service: ServiceProcess, body: bytes, status: int, detail: str
) -> None:
    """The error is problem JSON, and the service keeps answering."""
    answer = service.ask("POST", "/v1/check", body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert detail in answer.data["detail"]
    assert service.ask("POST", "/v1/check", {"endpoint": "/"}).status == 200


QUERIES = [
    ("user=%00", 400),
    ("user=%ff", 400),
    ("usr=1", 400),
    ("user=" + "x" * 20_000, 400),
    ("user=1&user=2", 400),
    ("&".join(f"attributes.a{n}=1" for n in range(200)), 400),
]


@pytest.mark.parametrize(("query", "status"), QUERIES, ids=lambda value: str(value)[:20])
def test_an_invalid_query_is_4xx(service: ServiceProcess, query: str, status: int) -> None:
    """The error has the code INVALID_REQUEST."""
    answer = service.ask("GET", f"/v1/quota?{query}")
    assert answer.status == status
    assert answer.data["error"]["code"] == "INVALID_REQUEST"


HEADS: list[tuple[str, bytes]] = [
    ("NUL", b"X-Request-Id: a\0b"),
    ("a megabyte", b"X-Request-Id: " + b"a" * 2**20),
    ("a thousand of them", b"\r\n".join(b"X-%d: a" % n for n in range(1_000))),
    ("no name", b": a"),
    ("folded", b"X-Request-Id: a\r\n b"),
    ("two lengths", b"Content-Length: 2\r\nContent-Length: 3"),
    ("an invalid length", b"Content-Length: x"),
]


@pytest.mark.parametrize("head", [each[1] for each in HEADS], ids=[each[0] for each in HEADS])
def test_an_invalid_head_is_4xx(service: ServiceProcess, head: bytes) -> None:
    """The service answers 4xx to an invalid head, or closes the connection."""
    reply = raw(service, b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n{}")
    assert reply == b"" or reply.startswith(b"HTTP/1.1 4"), reply[:200]
    assert service.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize(
    ("length", "status"), [(30_000, b"200"), (66_000, b"431"), (100_000, b"431")]
)
def test_a_head_has_a_maximum_size(service: ServiceProcess, length: int, status: bytes) -> None:
    """32 KiB pass; 64 KiB do not."""
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * length
    assert raw(service, head + b"\r\n\r\n").startswith(b"HTTP/1.1 " + status)


REPEATED = [
    (b"GET /v1/quota?user=1", b"Host: localhost\r\nHost: 127.0.0.1"),
    (b"GET /v1/quota?user=1", b"Host: localhost\r\nAuthorization: a\r\nAuthorization: b"),
    (b"GET /v1/admin/rules", b"Host: localhost\r\nAuthorization: a\r\nauthorization: a"),
    (b"GET /v1/authorize", b"Host: localhost\r\nX-Original-URI: /a\r\nX-Original-URI: /b"),
    (b"GET /v1/authorize", b"Host: localhost\r\nX-Forwarded-Uri: /a\r\nX-Forwarded-Uri: /a"),
    (
        b"GET /v1/authorize",
        b"Host: localhost\r\nX-Original-URI: /a" + b"\r\nX-Ratekeeper-Token: rk_1" * 2,
    ),
    (b"GET /v1/quota?user=1", b"Accept: */*"),
    (b"GET /console/login", b"Accept: */*"),
]


@pytest.mark.parametrize(("line", "head"), REPEATED)
def test_an_ambiguous_head_is_400(service: ServiceProcess, line: bytes, head: bytes) -> None:
    """A header that decides who calls or what is checked is given once; Host is never missing."""
    reply = raw(service, line + b" HTTP/1.1\r\n" + head + b"\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400"), reply
    assert b"application/problem+json" in reply


@pytest.mark.parametrize("value", ["é", "\x01", "a" * 500, "x" * 50_000])
def test_an_unusual_header_is_no_server_error(service: ServiceProcess, value: str) -> None:
    """The service ignores an unusual request ID, or rejects the request."""
    reply = raw(
        service,
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: "
        + value.encode("latin-1")
        + b"\r\nAuthorization: "
        + value.encode("latin-1")
        + b"\r\n\r\n",
    )
    assert reply.split()[1] in {b"200", b"400", b"431"}


def raw(service: ServiceProcess, request: bytes) -> bytes:
    """Send these bytes; return the reply up to the end of its head or of the connection."""
    parts = urlsplit(service.url)
    # The first request of the console or the admin API imports it.
    with socket.create_connection((parts.hostname, parts.port), ASK_SECONDS_MAX) as connection:
        reply = b""
        try:
            connection.sendall(request)
            while piece := connection.recv(65_536):
                reply += piece
                if b"\r\n\r\n" in reply:
                    break
        except OSError:
            return reply
        return reply


def test_the_access_log_has_no_keys(service: ServiceProcess) -> None:
    """The log has the path and status of a request, but no key of its query or body."""
    service.ask("GET", "/v1/quota?api_key=sk_very_secret")
    service.ask("POST", "/v1/check", {"api_key": "sk_very_secret"})

    def logged() -> list[tuple[str, int]]:
        found = [each for each in service.events() if each["event"] == "access"]
        return [(each["path"], each["status"]) for each in found]

    until(
        lambda: {("/v1/quota", 200), ("/v1/check", 200)} <= set(logged()),
        "both requests are logged",
        60,
    )
    assert "sk_very_secret" not in service.log_text()


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────

FORM = b"Content-Type: application/x-www-form-urlencoded\r\n"


@pytest.mark.parametrize("path", [b"/console/login", b"/v1/check", b"/v1/check/batch"])
def test_a_body_that_is_declared_too_large_is_rejected_unread(
    service: ServiceProcess, path: bytes
) -> None:
    """The client gets 413 before it has sent a byte of the body, and needs no token for that."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: 15000000\r\n\r\n"
    reply = raw(service, head % (path, FORM if b"console" in path else b""))
    assert reply.startswith(b"HTTP/1.1 413"), reply


def test_a_chunked_body_is_counted_while_it_arrives(service: ServiceProcess) -> None:
    """A login of a few megabytes that never ends is rejected before its end."""
    head = b"POST /console/login HTTP/1.1\r\nHost: localhost\r\n" + FORM
    body = (b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 40
    reply = raw(service, head + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert reply.startswith(b"HTTP/1.1 413"), reply


@pytest.mark.parametrize("path", [b"/console/login", b"/v1/check"])
def test_a_body_in_very_small_chunks_is_rejected(service: ServiceProcess, path: bytes) -> None:
    """Each chunk costs the worker time. A short body may have chunks of one byte all the same."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n" % path
    head += FORM if b"console" in path else b""
    reply = raw(service, head + b"\r\n" + b"1\r\n \r\n" * 5_000)
    assert reply.startswith(b"HTTP/1.1 400"), reply
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in b'{"user": "42"}')
    if path == b"/v1/check":
        assert raw(service, head + b"\r\n" + chunks + b"0\r\n\r\n").startswith(b"HTTP/1.1 200")


# ── Tokens and connections ─────────────────────────────────────────────────────────────────────


def bearer(secret: str) -> dict[str, str]:
    """Return the Authorization header with a token."""
    return {"Authorization": f"Bearer {secret}"}


def test_a_token_with_a_scope_reaches_only_its_own_quota() -> None:
    """No endpoint lets it read or spend another quota, and the log has no secret."""
    with ServiceProcess(RULES) as service:
        # Without tokens every client may check. Within a second after the first one, none may.
        assert service.ask("POST", "/v1/check", {"user": "1"}).status == 200
        path = service.data / "tokens.json"
        own = create_token(path, "one", "check", {"user": "1"})
        admin = create_token(path, "root", "admin")
        until(
            lambda: service.ask("GET", "/v1/quota?user=1").status == 401, "a token is required", 60
        )
        for method, url, body in (
            ("POST", "/v1/check", {"user": "2"}),
            ("POST", "/v1/check/batch", {"checks": [{"user": "1"}, {"user": "2"}]}),
            ("POST", "/v1/settle", {"user": "2", "reserved": 1, "actual": 0}),
            ("GET", "/v1/quota?user=2", None),
            ("DELETE", "/v1/quota?user=1", None),
            ("POST", "/v1/quota/grant", {"user": "1", "units": 1}),
            ("GET", "/v1/admin/rules", None),
        ):
            assert service.ask(method, url, body, bearer(own)).status == 403, (method, url)
        quota = service.ask("GET", "/v1/quota?user=2", headers=bearer(admin)).data
        assert quota["rules"][0]["limits"][0]["remaining"] == 100
        answer = service.ask("POST", "/v1/check", {}, bearer(own))
        assert (answer.status, answer.data["remaining"]) == (200, 98)
        assert service.ask("GET", "/v1/admin/rules", headers=bearer(admin)).status == 200
        remove_token(path, "one")
        until(
            lambda: service.ask("POST", "/v1/check", {}, bearer(own)).status == 401,
            "the removed token is rejected",
            60,
        )
        assert own not in service.log_text()
        assert admin not in service.log_text()


def test_other_machines_may_connect_only_with_tokens(tmp_path: Path) -> None:
    """With a public address and no tokens, the service refuses to start and says what to do."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(RULES))
    done = run_to_end(
        ["serve", "--host", "0.0.0.0", "--rules", str(rules), "--data", str(tmp_path / "data")]
    )
    assert done.returncode == 2
    assert "ratekeeper token create" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_web_page_on_this_machine_cannot_call_the_service(service: ServiceProcess) -> None:
    """Its name resolves to this machine (DNS rebinding), or it is of another origin."""
    body = {"user": "page"}
    rebound = {"Host": "evil.example"}
    crossing = {"Origin": "https://evil.example"}
    for headers in (rebound, crossing):
        for path in ("/v1/quota?user=page", "/metrics", "/readyz", "/docs", "/v1/admin/top"):
            assert service.ask("GET", path, headers=headers).status == 403, path
        assert service.ask("POST", "/v1/check", body, headers).status == 403
        assert service.ask("POST", "/v1/limit", body, headers).status == 403
    assert service.ask("POST", "/v1/check", body).data["remaining"] == 99


@pytest.mark.parametrize("sent", [b"", b"P", b"PRI * HTTP/2.0\r\n\r\n", b"GET / HTTP/1.1\r\n"])
def test_an_idle_connection_is_closed(sent: bytes, service: ServiceProcess) -> None:
    """A worker has a limited number of connections, so it closes one after ten idle seconds."""
    parts = urlsplit(service.url)
    with socket.create_connection((parts.hostname, parts.port), 60) as silent:
        silent.sendall(sent)
        while silent.recv(65_536):  # an error may come before the end
            pass


def test_idle_connections_of_one_client_do_not_lock_others_out(service: ServiceProcess) -> None:
    """While 1,300 connections send nothing or a part of a head, another client is served."""
    parts = urlsplit(service.url)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(files[0], 4_096), files[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, files)
        idle = []
        for number in range(1_300):
            idle.append(stack.enter_context(socket.create_connection((parts.hostname, parts.port))))
            idle[-1].sendall((b"", b"P", b"GET /healthz HTTP/1.1\r\nHost: local")[number % 3])
        assert service.ask("POST", "/v1/check", {"user": "patient"}).status == 200
        # The service did not have to close one of them first.
        idle[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[0].recv(1)


class FewFiles(ServiceProcess):
    """A service whose processes may open 200 files, and may not raise that."""

    def command(self) -> list[str]:
        """Return the command line, behind that of a shell that sets the limit."""
        return ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *super().command()]


def test_a_service_with_few_files_answers_and_says_so() -> None:
    """With 900 idle connections, a health check is answered, and the log has the remedy."""
    with FewFiles(RULES) as service, ExitStack() as stack:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(files[0], 4_096), files[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, files)
        parts = urlsplit(service.url)
        for _ in range(900):
            stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
        assert service.ask("GET", "/healthz").status == 200
        (warned,) = [each for each in service.events() if each["event"] == "few_files"]
        assert "ulimit -n" in warned["message"]


def test_tls(tmp_path: Path) -> None:
    """With a certificate the service speaks TLS 1.2 or later, and no plain HTTP."""
    made = make_certificates(tmp_path)
    options = ("--tls-cert", str(made.server_cert_path), "--tls-key", str(made.server_key_path))
    with ServiceProcess(RULES, *options) as service:
        assert service.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(made.ca_path))
        parts = urlsplit(service.url)
        with (
            socket.create_connection((parts.hostname, parts.port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            assert secured.version() in {"TLSv1.2", "TLSv1.3"}
        assert service.ask("POST", "/v1/check", {"user": "42"}).status == 200
        for origin, status in ((service.url, 200), (service.url.replace("https", "http"), 403)):
            sent = {"Origin": origin}
            assert service.ask("POST", "/v1/check", {"user": "42"}, sent).status == status
        assert not raw(service, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(
            b"HTTP"
        )


async def test_clients_of_grpc_need_a_certificate(tmp_path: Path) -> None:
    """With --grpc-client-ca, a call without one fails, and a call with one gets a reply."""
    made = make_certificates(tmp_path)
    options = ("--tls-cert", str(made.server_cert_path), "--tls-key", str(made.server_key_path))
    authority = made.ca_path.read_bytes()
    own = (made.client_key_path.read_bytes(), made.client_cert_path.read_bytes())
    with ServiceProcess(
        RULES, *options, "--grpc-client-ca", str(made.ca_path), grpc=True
    ) as service:
        trusted = grpc.ssl_channel_credentials(authority, *own)
        async with grpc.aio.secure_channel(service.grpc, trusted) as channel:
            assert codes(await caller_on(channel)(entries(("user", "1"))))[0] == "OK"
        without = grpc.ssl_channel_credentials(authority)
        async with grpc.aio.secure_channel(service.grpc, without) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await caller_on(channel)(entries(("user", "1")), timeout=2)


def test_a_certificate_is_renewed(tmp_path: Path) -> None:
    """After SIGHUP, HTTP and gRPC use the new certificate behind a link, as in Kubernetes."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made = make_certificates(tmp_path / name)
    (tmp_path / "live").symlink_to("first")
    key = tmp_path / "live" / made.server_key_path.name
    certificate = tmp_path / "live" / made.server_cert_path.name
    options = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with ServiceProcess(RULES, *options, grpc=True) as service:
        addresses = (urlsplit(service.url).netloc, service.grpc)
        shown = [ssl.get_server_certificate(_split(each), timeout=10) for each in addresses]
        assert shown == [certificate.read_text()] * 2
        (tmp_path / "other").symlink_to("second")
        (tmp_path / "other").replace(tmp_path / "live")
        shutil.rmtree(tmp_path / "first")
        assert service.pid is not None
        os.kill(service.pid, signal.SIGHUP)
        until(
            lambda: {_shown(each) for each in addresses} == {certificate.read_text()},
            "the new certificate is in use",
            60,
            service.log_end,
        )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _shown(address: str) -> str:
    try:
        return ssl.get_server_certificate(_split(address), timeout=10)
    except OSError:
        return ""


# ── Tokens of clients ────────────────────────────────────────────────────────────────────────────


def test_a_real_service_verifies_claims_with_the_keys_of_a_url() -> None:
    """A token that the provider signed is counted by its user, a forged one is not."""
    rules = {
        "version": 1,
        "rules": [{"id": "a", "by": ["user"], "match": {"user": "*"}, "limits": ["1/hour"]}],
    }
    with Provider(jwk(RSA_KEY)) as provider:
        options = ("--identify", "user=claim:sub", "--jwks", provider.url,
                   "--jwt-algorithm", "RS256", "--jwt-audience", "shop")  # fmt: skip
        with ServiceProcess(rules, *options) as service:
            for key, statuses in ((RSA_KEY, [200, 429]), (OTHER_KEY, [200, 200])):
                token = jwt.encode(
                    {"sub": "ann", "aud": "shop"}, key, algorithm="RS256", headers={"kid": "1"}
                )
                headers = {"X-Original-URI": "/", "Authorization": f"Bearer {token}"}
                found = [service.ask("GET", "/v1/authorize", headers=headers) for _ in range(2)]
                assert [each.status for each in found] == statuses
