"""Process-wide switches for tests: replace the system clock, turn limiting off, forget all counts.

Applications often create limiters at import time, where a test cannot reach them. These switches
apply to all limiters. Only `ratekeeper.testing` sets them. Limiters read them on every check; the C
kernel reads the time without calling Python, so it learns of a change through `on_change`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from weakref import WeakSet

from ratekeeper.core.errors import StoreUnavailable

if TYPE_CHECKING:
    from ratekeeper.core.clock import Clock

clock: Clock | None = None
limiting_off: bool = False

_on_change: list[Callable[[], None]] = []


class Forgetting(Protocol):
    """An object with counts of this process."""

    def forget_all(self) -> Any:
        """Forget all counts."""
        ...


ForgettingType = TypeVar("ForgettingType", bound=Forgetting)
_forgetting: Final[WeakSet[Forgetting]] = WeakSet()


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


def forgetting(keeper: ForgettingType) -> ForgettingType:
    """Make `forget_counts` include an object, as long as it exists. Returns the object."""
    _forgetting.add(keeper)
    return keeper


def forget_counts() -> None:
    """Forget the counts that are kept in this process alone."""
    for keeper in list(_forgetting):
        with suppress(StoreUnavailable):  # a store that was closed
            keeper.forget_all()
