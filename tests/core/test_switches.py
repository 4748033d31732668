"""The switches notify the engines that read the time without calling Python."""

from __future__ import annotations

import pytest

from ratekeeper.core import switches
from ratekeeper.testing import ManualClock, limiting_off, use_clock


def test_every_change_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener is called when either switch is set and when it is restored."""
    heard: list[tuple[bool, bool]] = []
    monkeypatch.setattr(switches, "_on_change", [])
    switches.on_change(lambda: heard.append((switches.clock is not None, switches.limiting_off)))
    with use_clock(ManualClock()), limiting_off():
        pass
    assert heard == [(True, False), (True, True), (True, False), (False, False)]
