"""Test my own code that has limits, without waiting and without tests that disturb each other.

`use_clock(ManualClock())` sets the time of all limiters that were made without `clock=`, also of
those in modules, `forget_counts` empties them, and `limiting_off` turns limits off. With pytest,
they are the fixtures `ratekeeper_clock`, `ratekeeper_fresh` and `ratekeeper_off`.

Two traps. To mock `time.time` does nothing: limits do not use it. And a limiter of a module keeps
its counts from one test to the next, so a test passes alone and fails in company: forget them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import patch

from flask import Flask

from ratekeeper import Limiter
from ratekeeper.flask import RateLimit
from ratekeeper.testing import ManualClock, forget_counts, limiting_off, use_clock

# ── The code under test ──────────────────────────────────────────────────────────────────────────


def make_app() -> Flask:
    app = Flask("shop")
    limit = RateLimit(app)
    app.add_url_rule("/export", view_func=limit("2/hour")(lambda: "exported"), endpoint="export")
    return app


reminders = Limiter("1/day")  # of a module: all tests share it


def remind(user: str) -> bool:
    return bool(reminders.check(user))


# ── The tests ────────────────────────────────────────────────────────────────────────────────────


def test_the_third_export_waits_half_an_hour() -> None:
    with use_clock(ManualClock()) as clock:
        client = make_app().test_client()
        assert [client.get("/export").status_code for _ in range(3)] == [200, 200, 429]
        wait = int(client.get("/export").headers["Retry-After"])
        assert wait == 1800
        clock.advance(wait - 1)
        assert client.get("/export").status_code == 429
        clock.advance(1)
        assert client.get("/export").status_code == 200


def test_exports_work_however_many_there_are() -> None:
    with limiting_off():
        client = make_app().test_client()
        assert {client.get("/export").status_code for _ in range(100)} == {200}


def test_a_user_is_reminded_once_a_day() -> None:
    forget_counts()
    with use_clock(ManualClock()) as clock:
        assert remind("bob")
        assert not remind("bob")
        clock.advance(86400)
        assert remind("bob")


def test_with_counts_of_another_test() -> None:
    with use_clock(ManualClock()):
        assert remind("bob")  # fails: the other test has used it up


def test_with_a_mocked_time() -> None:
    assert remind("another user")
    with patch("time.time", lambda: time.monotonic() + 1e9):
        assert remind("another user")  # fails: limits have their own clock


def failed(test: Callable[[], None]) -> bool:
    try:
        test()
    except AssertionError:
        return True
    return False


def main() -> None:
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            is_trap = name.startswith("test_with_")
            print("failed, as it must:" if is_trap else "passed:", name)
            assert failed(test) is is_trap


if __name__ == "__main__":
    main()
