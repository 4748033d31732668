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
    """Which of the two serves."""
    return str(request.param)


@pytest.fixture(scope="module")
def url(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the site is; its limits are in one file that all workers share."""
    folder = tmp_path_factory.mktemp("django")
    with web_workers.serving(SERVERS[kind], folder) as address:
        yield address


@pytest.mark.parametrize("prefix", ["/orders", "/async/orders"])
def test_the_limit_is_exact_over_all_workers(url: str, prefix: str) -> None:
    """100 requests of 8 clients, 4 processes, no store beside them: 40 pass. Both kinds of view."""
    web_workers.holds_exactly(url, prefix, "exact")


@pytest.mark.parametrize("prefix", ["/orders", "/async/orders"])
def test_headers_on_200_and_429(url: str, prefix: str) -> None:
    """All that clients can act on."""
    name = f"{prefix}/<int:number>"
    web_workers.tells_both_limits(url, f"{prefix}/7", name, "headers")


def test_retry_after_once_waited_succeeds(url: str) -> None:
    """In an async view, under either server."""
    web_workers.lets_in_who_has_waited(url, "/search")


def test_a_stream_is_untouched(url: str, kind: str) -> None:
    """Its pieces arrive as they are made."""
    web_workers.streams_untouched(url, "/stream" if kind == "wsgi" else "/async/stream")


def test_a_file_is_sent(url: str) -> None:
    """By whichever way the server sends files."""
    web_workers.sends_its_source(url, "django_app.py")


def test_only_failed_logins_count(url: str) -> None:
    """However many try at once."""
    web_workers.counts_failed_logins_only(url)


def test_costs_are_settled(url: str) -> None:
    """Before the client has its answer: the next request finds it, in whichever worker."""
    web_workers.settles_costs(url)
