"""Two process-wide switches for tests: replace the system clock, and turn limiting off.

Applications often create limiters at import time, where a test cannot reach them. These switches
apply to all limiters. Only `ratekeeper.testing` sets them. Limiters read them on every check; the C
kernel reads the time without calling Python, so it learns of a change through `on_change`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratekeeper.core.clock import Clock

clock: Clock | None = None
limiting_off: bool = False

_on_change: list[Callable[[], None]] = []


def on_change(notify: Callable[[], None]) -> None:
    """Call `notify` after every change of a switch."""
    _on_change.append(notify)


def set_clock(replacement: Clock | None) -> None:
    """Make every system clock return the time of `replacement`; None restores real time."""
    global clock  # noqa: PLW0603 - the switch is this module's purpose
    clock = replacement
    for notify in _on_change:
        notify()


def set_limiting_off(off: bool) -> None:
    """Make every limiter allow everything and count nothing, or end that."""
    global limiting_off  # noqa: PLW0603 - the switch is this module's purpose
    limiting_off = off
    for notify in _on_change:
        notify()
