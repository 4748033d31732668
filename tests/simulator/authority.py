"""The authority of a simulated fleet: the reference store, with its failures."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

from ratekeeper.core.errors import StoreError
from ratekeeper.core.model import Decision, Limit
from ratekeeper.core.steps import Call
from ratekeeper.decide.leasing import LeaseCheck, LeasedAnswer
from ratekeeper.decide.store import Counter
from ratekeeper.decide.stores.memory import MemoryAuthority
from tests.simulator.checkers import NeverOver
from tests.simulator.network import EventLoop

RULE: Final = "simulated"


class SimulatedAuthority:
    """The authority of the fleet: it may be unreachable, and forget its last writes."""

    def __init__(self, loop: EventLoop, limits: tuple[Limit, ...], never_over: NeverOver) -> None:
        self._loop = loop
        self._never_over = never_over
        self.store = MemoryAuthority(loop)
        self.counter: Counter = self.store.counter(limits, RULE)
        self.is_up = True
        self._replicas: list[_Replica] = []

    def carry_out(self, call: Call, node: int) -> Any:
        """Carry out a call that has arrived; return its result or the StoreError that it raised."""
        try:
            result = call.function(*call.args)
        except StoreError as error:
            return error
        name = call.function.__name__
        if name == "check":
            self._note(call.args[0], call.args[1], result, 0, node)
        elif name == "lease":
            self._note_leases(call.args[0], result, node)
        return result

    def _note_leases(
        self, checks: list[LeaseCheck], answers: list[LeasedAnswer], node: int
    ) -> None:
        for check, answer in zip(checks, answers, strict=True):
            if not isinstance(answer, StoreError):
                decision, lease = answer
                self._note(check.subject, check.cost, decision, lease.units, node)

    def _note(self, subject: str, cost: int, decision: Decision, leased: int, node: int) -> None:
        """Note an admission, and the units that were charged for it and leased with it."""
        if not decision.allowed:
            return
        self._never_over.admitted(subject, cost, self._loop.now, f"the authority for node {node}")
        for replica in self._replicas:
            replica.missed[subject] = replica.missed.get(subject, 0) + cost + leased

    def fail_over_after(self, lag_ns: int) -> None:
        """Fail over to a replica that is `lag_ns` behind: all writes from now until then are lost.

        Outstanding calls are answered by the new primary.
        """
        replica = _Replica(deepcopy(self._states()))
        self._replicas.append(replica)
        self._loop.after(lag_ns, self._fail_over, replica)

    def _fail_over(self, replica: _Replica) -> None:
        for table, (entries, expiries) in zip(self._tables(), replica.states, strict=True):
            table.entries, table.expiries = entries, expiries
        self._replicas.remove(replica)
        for subject, units in replica.missed.items():
            self._never_over.forget(subject, units)

    def _states(self) -> list[Any]:
        return [(table.entries, table.expiries) for table in self._tables()]

    def _tables(self) -> list[Any]:
        tables = self.store._tables
        return list(tables.values())


@dataclass(slots=True)
class _Replica:
    """A copy of the authority's states, and the units that were charged since."""

    states: list[Any]
    missed: dict[str, int] = field(default_factory=dict)
