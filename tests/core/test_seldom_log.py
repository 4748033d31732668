"""A message that clients cause does not fill the log."""

from __future__ import annotations

import logging

import pytest

from ratekeeper.core import seldom_log
from ratekeeper.core.seldom_log import SeldomLog

LOG = logging.getLogger("ratekeeper.test")


def test_one_message_in_an_interval_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the number of those that were omitted before it, for each key apart."""
    now_s = 100.0
    log = SeldomLog(LOG, logging.ERROR, 1.0, lambda: now_s)
    for now_s in (100.0, 100.5, 100.9, 101.0, 102.0):
        log.note("a %s failed", "call", error=ValueError("why"))
        log.note("another", key=f"{now_s}")
    assert [each.getMessage() for each in caplog.records if "another" not in each.message] == [
        "a call failed",
        "a call failed (2 more were not logged)",
        "a call failed",
    ]
    assert sum("another" in each.message for each in caplog.records) == 5
    assert "ValueError: why" in caplog.text


def test_the_keys_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too many keys, their last messages are forgotten."""
    monkeypatch.setattr(seldom_log, "KEYS_MAX", 3)
    log = SeldomLog(LOG, logging.WARNING, 60.0, lambda: 100.0)
    for key in ("a", "b", "c", "d", "a"):
        log.note("%s", key, key=key)
    assert [each.getMessage() for each in caplog.records] == ["a", "b", "c", "d", "a"]
