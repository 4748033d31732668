"""The Flask example in four worker processes of gunicorn, over real connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import web_workers


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the application is; its limits are in one file that all workers share."""
    folder = tmp_path_factory.mktemp("flask")
    with web_workers.serving(web_workers.gunicorn("flask_app:app"), folder) as address:
        yield address


def test_the_limit_is_exact_over_all_workers(url: str) -> None:
    """100 requests of 8 clients, 4 processes, no store beside them: 40 pass."""
    web_workers.holds_exactly(url, "/orders", "exact")


def test_headers_on_200_and_429(url: str) -> None:
    """All that clients can act on."""
    web_workers.tells_both_limits(url, "/orders/7", "order", "headers")


def test_retry_after_once_waited_succeeds(url: str) -> None:
    """Also where the view is async."""
    web_workers.lets_in_who_has_waited(url, "/search")


def test_a_stream_is_untouched(url: str) -> None:
    """Its pieces arrive as they are made."""
    web_workers.streams_untouched(url, "/stream")


def test_a_file_is_sent(url: str) -> None:
    """gunicorn sends it from the kernel."""
    web_workers.sends_its_source(url, "flask_app.py")


def test_only_failed_logins_count(url: str) -> None:
    """However many try at once."""
    web_workers.counts_failed_logins_only(url)


def test_costs_are_settled(url: str) -> None:
    """Before the client has its answer: the next request finds it, in whichever worker."""
    web_workers.settles_costs(url)
