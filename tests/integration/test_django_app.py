"""The Django example in four worker processes, of gunicorn (WSGI) and of uvicorn (ASGI)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import web_workers

SERVERS = {
    "wsgi": web_workers.gunicorn("django_app:application"),
    "asgi": web_workers.uvicorn("django_app:asgi"),
}


@pytest.fixture(scope="module", params=SERVERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of server: WSGI or ASGI."""
    return str(request.param)


@pytest.fixture(scope="module")
def url(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the site with its limits in one file that all workers share; return its URL."""
    folder = tmp_path_factory.mktemp("django")
    with web_workers.serving(SERVERS[kind], folder) as address:
        yield address


@pytest.mark.parametrize("prefix", ["/orders", "/async/orders"])
def test_the_limit_is_exact_over_all_workers(url: str, prefix: str) -> None:
    """100 requests from 8 clients to 4 processes that share a file: 40 are allowed."""
    web_workers.holds_exactly(url, prefix, "exact")


@pytest.mark.parametrize("prefix", ["/orders", "/async/orders"])
def test_headers_on_200_and_429(url: str, prefix: str) -> None:
    """They have every value that a client can act on."""
    name = f"{prefix}/<int:number>"
    web_workers.sends_both_limits(url, f"{prefix}/7", name, "headers")


def test_retry_after_once_waited_succeeds(url: str) -> None:
    """This holds for an async view under both servers."""
    web_workers.allows_after_retry_after(url, "/search")


def test_a_stream_is_untouched(url: str, kind: str) -> None:
    """Each part arrives as soon as the application creates it."""
    web_workers.streams_untouched(url, "/stream" if kind == "wsgi" else "/async/stream")


def test_a_file_is_sent(url: str) -> None:
    """The server may send it in any way it supports."""
    web_workers.sends_its_source(url, "django_app.py")


def test_only_failed_logins_count(url: str) -> None:
    """This holds for concurrent attempts."""
    web_workers.counts_failed_logins_only(url)


def test_costs_are_settled(url: str) -> None:
    """They are settled before the response ends, so the next request of any worker sees it."""
    web_workers.settles_costs(url)
