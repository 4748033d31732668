"""Enforcers whose steps run to their end, in threads or in an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ratekeeper import Limiter
from ratekeeper.core.steps import asked, run
from ratekeeper.web.enforcer import Charge, Enforcer
from ratekeeper.web.options import EnforcerOptions


class Driven:
    """An Enforcer whose steps run to their end, in this thread or in an event loop."""

    def __init__(self, enforcer: Enforcer, drive: Callable[[Any], Any]) -> None:
        self.enforcer = enforcer
        self._drive = drive
        self.clock = enforcer.clock

    def enter(self, request: Any) -> Charge:
        charge: Charge = self._drive(asked(self.enforcer.charge, request))
        return charge

    def leave(self, charge: Charge, status: int | None = None) -> None:
        self._drive(self.enforcer.leaving(charge, status))

    def response(self, request: Any, result: Any) -> Any:
        return self._drive(self.enforcer.answering(request, result))

    def route_enforcer(self, options: EnforcerOptions, name: str) -> Driven:
        return Driven(self.enforcer.route_enforcer(options, name), self._drive)

    def close(self) -> None:
        self._drive(self.enforcer.closing())


def in_thread(**options: Any) -> Driven:
    """Return an enforcer of these options, for threads."""
    return Driven(Enforcer(EnforcerOptions(**options), Limiter), run)
