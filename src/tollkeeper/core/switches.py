"""What a test may replace for the whole process: the system clock, and limiting itself.

Limiters are often made at import time, out of a test's reach. These two switches reach them all.
Only `tollkeeper.testing` sets them; the path reads them, and the kernel is told through
`on_change`, because it reads time without asking Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tollkeeper.core.clock import Clock

clock: Clock | None = None
limiting_off: bool = False

_on_change: list[Callable[[], None]] = []


def on_change(notify: Callable[[], None]) -> None:
    """Call `notify` after every change of a switch."""
    _on_change.append(notify)


def set_clock(replacement: Clock | None) -> None:
    """Make every system clock read `replacement`; None gives real time back."""
    global clock  # noqa: PLW0603 - the switch is this module's purpose
    clock = replacement
    for notify in _on_change:
        notify()


def set_limiting_off(off: bool) -> None:
    """Make every limiter allow everything and count nothing."""
    global limiting_off  # noqa: PLW0603 - the switch is this module's purpose
    limiting_off = off
    for notify in _on_change:
        notify()
