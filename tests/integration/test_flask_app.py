"""The Flask example in four worker processes of gunicorn, over real connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import web_workers


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the application with its limits in one file that all workers share; return its URL."""
    folder = tmp_path_factory.mktemp("flask")
    with web_workers.serving(web_workers.gunicorn("flask_app:app"), folder) as address:
        yield address


def test_the_limit_is_exact_over_all_workers(url: str) -> None:
    """100 requests from 8 clients to 4 processes that share a file: 40 are allowed."""
    web_workers.holds_exactly(url, "/orders", "exact")


def test_headers_on_200_and_429(url: str) -> None:
    """They have every value that a client can act on."""
    web_workers.sends_both_limits(url, "/orders/7", "order", "headers")


def test_retry_after_once_waited_succeeds(url: str) -> None:
    """This holds for an async view, too."""
    web_workers.allows_after_retry_after(url, "/search")


def test_a_stream_is_untouched(url: str) -> None:
    """Each part arrives as soon as the application creates it."""
    web_workers.streams_untouched(url, "/stream")


def test_a_file_is_sent(url: str) -> None:
    """gunicorn sends it with sendfile."""
    web_workers.sends_its_source(url, "flask_app.py")


def test_only_failed_logins_count(url: str) -> None:
    """This holds for concurrent attempts."""
    web_workers.counts_failed_logins_only(url)


def test_costs_are_settled(url: str) -> None:
    """They are settled before the response ends, so the next request of any worker sees it."""
    web_workers.settles_costs(url)
