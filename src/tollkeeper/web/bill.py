"""What one request was charged, by all who limit it: a middleware, a blueprint, a view.

Whoever serves the request first makes its bill and finishes it. Whoever limits it further in puts a
charge on it, so that a response has the headers of all limits in one piece, and a request that one
of them denies costs nothing in the others.

This is for the frameworks that are not pure ASGI; `passage.py` is the same for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final

from tollkeeper.core.model import NAME_LENGTH_MAX, CheckResult
from tollkeeper.web.answers import headers_of
from tollkeeper.web.calls import Call
from tollkeeper.web.charges import PASSED, Charge, joined
from tollkeeper.web.guard import AsyncGuard, Guard, Refused

Header = tuple[str, str]

# Who sends one of these speaks of limits of its own.
_OURS: Final = ("ratelimit", "x-ratelimit-")
_RETRY_AFTER: Final = "retry-after"
# Room for the "#2" of a route's second limit.
_NAME_LENGTH_MAX: Final = NAME_LENGTH_MAX - 8


class Bill:
    """The charges of one request, by all who limit it."""

    __slots__ = ("_charges", "_guard", "_names", "status")

    def __init__(self, guard: Guard | AsyncGuard) -> None:
        """`guard` is the outermost: its clock and its style are the response's."""
        self._guard = guard
        self._charges: list[tuple[Any, Charge]] = []
        self._names: dict[str, int] = {}
        self.status: int | None = None

    def add(self, guard: Guard | AsyncGuard, charge: Charge) -> bool:
        """Put a charge on the bill. False for one that is denied: then the others are refunded."""
        self._charges.append((guard, charge))
        if not charge.decision.allowed:
            self.refund()
        return charge.decision.allowed

    def refund(self) -> None:
        """Make the request cost nothing: what one limit denies costs nothing in the others."""
        for _, charge in self._charges:
            charge.refund()

    def name_of(self, name: str) -> str:
        """A name for limits of one request, the first as it is: no two of them share a count."""
        number = self._names[name] = self._names.get(name, 0) + 1
        if len(name) > _NAME_LENGTH_MAX or not name.isprintable():
            digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16)
            name = f"#{digest.hexdigest()}"
        return name if number == 1 else f"{name}#{number}"

    @property
    def charge(self) -> Charge:
        """The last charge that was made."""
        return self._charges[-1][1] if self._charges else Charge(PASSED)

    @property
    def ruling(self) -> CheckResult:
        """What was decided on the request in all."""
        rulings = [charge.ruling for _, charge in self._charges]
        return joined(rulings) if rulings else PASSED

    def headers_beside(self, names: Iterable[str]) -> list[Header]:
        """The headers to add to a response that has these. What the application says stays."""
        known = {name.lower() for name in names}
        if any(name.startswith(_OURS) for name in known):
            return []
        ours = headers_of(self.ruling, self._guard.clock.now_ns(), self._guard.style)
        if _RETRY_AFTER in known:
            ours = [each for each in ours if each[0].lower() != _RETRY_AFTER]
        return ours

    def fail(self, error: BaseException) -> None:
        """A handler that raises counts as a 500; one that is ended from outside has no outcome."""
        if isinstance(error, Exception):
            self.status = 500

    def unsettled(self) -> list[tuple[Any, Charge]]:
        """The charges that may have to be changed, with the guard of each."""
        return [
            (guard, charge)
            for guard, charge in self._charges
            if charge.changed or guard.terms.count is not None
        ]

    def settle(self) -> None:
        """Apply what the request has cost up to now; by `status`, where the outcome counts."""
        for guard, charge in self.unsettled():
            guard.leave(charge, self.status)

    def refusal(self, guard: Guard, call: Call) -> Any:
        """Charge the request. None if it may pass; else its Answer, or what `on_limit` returned."""
        try:
            charge = guard.enter(call)
        except Refused as refused:
            self.refund()
            self.settle()
            return refused.answer
        if self.add(guard, charge):
            return None
        self.settle()
        ruling = self.ruling
        response = guard.response(call, ruling)
        return guard.refusal(ruling) if response is None else response
