"""Checks on Redis: a request is a group of charges, and one script call decides the group.

A check of one subject is a group of one charge. A check of several subjects is a group as well, if
one server has all of them. In a cluster, a script can only use keys of one slot: then each slot is
a group of its own, and the decider (`decide/decider.py`) makes all of them pass, or none.

A `CheckGroup` does no I/O. A driver sends it, alone or together with other groups, and gives it the
replies. The other verbs are steps that a driver runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, Final

from hiredis import ReplyError

from ratekeeper.core import switches
from ratekeeper.core.errors import StoreError, StoreUnavailable, show
from ratekeeper.core.model import Decision
from ratekeeper.core.steps import Ask, Steps, asking
from ratekeeper.decide.algorithms.in_flight import NO_STAMP
from ratekeeper.decide.decider import Group, deciding
from ratekeeper.decide.leasing import NO_LEASE, Lease, LeaseTerms
from ratekeeper.decide.store import Answer, Charge
from ratekeeper.decide.stores.redis.codec import NS_PER_US
from ratekeeper.decide.stores.redis.denial_cache import Moment
from ratekeeper.decide.stores.redis.driver import Links, RedisDriver
from ratekeeper.decide.stores.redis.scripts import (
    SERVER_NOW,
    SLOTS,
    ReportAttempt,
    RuleScripts,
    ScriptCall,
    ScriptCharge,
    batch_call,
    charge_replies,
    report_call,
)

# Reports in one call: a script holds up all other calls of its server.
REPORTS_MAX: Final = 64

# By limits and subject: the leases that came with charges, and the terms of those to ask for.
Leases = dict[tuple[bytes, str], Lease]
Terms = dict[tuple[bytes, str], LeaseTerms]
NOTHING: Final = ((), ())
_new: Final = tuple.__new__


class CheckGroup:
    """The charges of one request that one script call decides: all of them are made, or none.

    The answer is a list with the answer to each charge. The answer of a check `alone` is its
    decision; errors are raised.
    """

    __slots__ = (
        "_asked_ns",
        "_charged",
        "_links",
        "_looks",
        "alone",
        "charges",
        "future",
        "leases",
        "moment",
        "raises",
    )

    future: asyncio.Future[Any]
    """The answer, for a caller on asyncio."""

    def __init__(
        self,
        links: Links,
        charges: Sequence[ScriptCharge],
        *,
        alone: bool = False,
        looks: bool = False,
        raises: bool = False,
        leases: Leases | None = None,
    ) -> None:
        """A check alone that `looks` spends nothing.

        With `raises`, the error of the whole call is raised; it is no answer to each charge.

        `leases` gets the leases that come with the charges, which have terms then.
        """
        self._links = links
        self.charges = charges
        self.alone = alone
        self.raises = raises or alone
        self.leases = leases
        self._looks = looks
        self.moment: Moment = SERVER_NOW
        scripts = charges[0].scripts
        if not scripts.by_server_clock or switches.clock is not None:
            self.moment = scripts.now()
        self._asked_ns = time.monotonic_ns()
        # The replies to charges that were made and not undone, and the answers.
        self._charged: tuple[Sequence[Any], Sequence[Answer]] = NOTHING

    def equal(self) -> Hashable:
        """Return the same for checks that one charge of a call can stand for."""
        charge = self.charges[0]
        plain = self.alone and charge.cost and not self._looks and not charge.stamp
        return charge if plain else self

    def lane(self, *, clustered: bool) -> Hashable:
        """Return the same for groups that can share a call."""
        if clustered:  # only equal checks: other keys of a slot may move to another server
            return self.moment, self.equal()
        is_plain = self.leases is None and not self._looks
        return self.moment if is_plain else (self.moment, self._looks)

    def call(self) -> ScriptCall:
        """Return the call that decides this group."""
        return self.call_of([self.charges])

    def call_of(self, charges: Sequence[Sequence[ScriptCharge]]) -> ScriptCall:
        """Return the call that decides this group and others of its lane."""
        return batch_call(charges, self.moment[0], spend=not self._looks)

    def command(self) -> tuple[bytes, bytes]:
        """Return the key of the call, and the bytes to send."""
        scripts, subject, cost, _, _, _, stamp = self.charges[0]
        plain = self.leases is None and not stamp
        if len(self.charges) == 1 and self.moment is SERVER_NOW and plain:
            # Without making the call. Alone in its group, a charge may as well be optional.
            return scripts.check_command(subject, cost, spend=not self._looks)
        call = batch_call([self.charges], self.moment[0], spend=not self._looks)
        return call.key, call.by_sha()

    # ── Replies ────────────────────────────────────────────────────────────────────────────────

    def failed(self, error: StoreError) -> list[Answer]:
        """Return the answers if the call failed. Raises the error of a check alone."""
        if self.raises:
            raise error
        return [error] * len(self.charges)

    def read(self, replies: Sequence[Any], at: int = 0) -> Any:
        """Return the answer, from the replies that begin at a position of a longer list.

        Raises CapacityError, and the error of a check alone.
        """
        if not self.alone:
            return self._answers(replies[at : at + len(self.charges)])
        reply = replies[at]
        charge = self.charges[0]
        if type(reply) is not list:
            raise self._error(reply)
        if self._looks:
            return charge[0].decoder.peek(reply, charge[2], self.moment[1])
        decision = charge[0].decoder.check(reply, charge[2], self.moment[1])
        if not decision.allowed:
            self._keep(charge, decision)
        return decision

    def read_equal(self, reply: Any, count: int) -> list[Decision]:
        """Return the decisions on `count` equal checks in a row, from the reply to all of them."""
        charge = self.charges[0]
        if type(reply) is not list:
            raise self._error(reply)
        decisions = charge.scripts.decoder.checks_in_turn(reply, charge.cost, count, self.moment[1])
        if not decisions[-1].allowed:
            self._keep(charge, decisions[-1])
        return decisions

    def _keep(self, charge: ScriptCharge, denial: Decision) -> None:
        # When a request in flight ends is not known, so neither is how long its denials last.
        if charge.cost == 1 and not denial.remaining and charge.scripts.script is not SLOTS:
            self._links.cache.keep(charge, denial, self.moment, self._asked_ns)

    def _answers(self, replies: Sequence[Any]) -> list[Answer]:
        answers: list[Answer] = []
        passes = True
        for charge, reply in zip(self.charges, replies, strict=True):
            try:
                if type(reply) is not list:
                    raise self._error(reply)
                plain = reply if self.leases is None else self._without_lease(charge, reply)
                answers.append(charge.scripts.decoder.check(plain, charge.cost, self.moment[1]))
                passes = passes and reply[0] >= 0
            except StoreError as error:
                answers.append(error)
                passes = passes and charge.optional
        if passes:
            self._charged = (replies, answers)
            if self.leases is not None:
                self._note_leases(self.leases)
            return answers
        # Nothing was charged, so the answers say what remains now.
        return [
            answer
            if isinstance(answer, StoreError)
            else charge.scripts.decoder.peek(
                self._without_lease(charge, reply), charge.cost, self.moment[1]
            )
            for charge, reply, answer in zip(self.charges, replies, answers, strict=True)
        ]

    def _without_lease(self, charge: ScriptCharge, reply: list[int]) -> list[int]:
        return reply if self.leases is None else reply[: -charge.scripts.decoder.lease_numbers]

    def _note_leases(self, leases: Leases) -> None:
        """Keep the leases that came with the charges."""
        for charge, reply, answer in zip(self.charges, *self._charged, strict=True):
            if not isinstance(answer, StoreError):
                lease = charge.scripts.decoder.lease(reply, answer, charge.cost)
                leases[charge.scripts.encoded, charge.subject] = lease

    def _error(self, reply: Any) -> StoreError:
        """Return the error of a charge, from a reply that is no list."""
        if isinstance(reply, ReplyError):
            return self._links.servers.error_of(reply)
        return reply if isinstance(reply, StoreError) else unknown_reply(reply)

    # ── Undo ───────────────────────────────────────────────────────────────────────────────────

    def undoing(self, driver: RedisDriver) -> Steps[None]:
        """Return exactly the units that were taken, once. Raises StoreError if that failed."""
        charged, self._charged = self._charged, NOTHING
        calls: list[ScriptCall] = []
        for charge, reply, answer in zip(self.charges if charged[0] else (), *charged, strict=True):
            scripts, subject, cost, *_, stamp = charge
            if isinstance(answer, StoreError) or not cost:
                continue
            calls.append(scripts.undo(subject, self._without_lease(charge, reply), cost, stamp))
            lease = (self.leases or {}).pop((scripts.encoded, subject), NO_LEASE)
            if lease.units:
                ends_us = lease.ends_ns // NS_PER_US
                back = ReportAttempt(scripts, subject, lease.units, False, ends_us)
                calls.append(report_call([back], self.moment[0]))
        if not calls:
            return
        try:
            undone = yield from driver.running_all(calls)
        finally:
            for charge in self.charges:
                self._links.cache.drop(charge.subject)
        for each in undone:
            if isinstance(each, StoreError):
                raise each

    @property
    def is_charged(self) -> bool:
        """True if its charges were made and not undone."""
        return bool(self._charged[0])


class RedisCounter:
    """One rule's limits on Redis."""

    __slots__ = ("_cache", "_links", "limits", "scripts", "stamp")

    def __init__(self, scripts: RuleScripts, links: Links, stamp: int = NO_STAMP) -> None:
        self.stamp = stamp
        self.limits = scripts.decoder.limits
        self.scripts = scripts
        self._links = links
        self._cache = links.cache

    def stamped(self, stamp: int) -> RedisCounter:
        """Return the counter for one request; see Counter.stamped."""
        return RedisCounter(self.scripts, self._links, stamp)

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: the server decides."""

    def check(self, subject: str, cost: int) -> Decision | Ask:
        """Spend `cost` units if every limit has room. One round trip, unless a denial is known."""
        if self._cache.denials:
            decision = self._cache.find(self.scripts, subject, cost)
            if decision is not None:
                return decision
        links = self._links
        # In half the time of a call of ScriptCharge.
        charge = _new(ScriptCharge, (self.scripts, subject, cost, False, 1, None, self.stamp))
        return Ask(links.wait, links.send, CheckGroup(links, (charge,), alone=True))

    def peek(self, subject: str, cost: int) -> Ask:
        """Return the answer of `check`, with the remaining quota as it is now."""
        links = self._links
        charge = ScriptCharge(self.scripts, subject, cost, stamp=self.stamp)
        group = CheckGroup(links, (charge,), alone=True, looks=True)
        return links.joint_ask(group)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> Ask:
        """Give units that were charged at `charged_ns` back to every limit."""
        return self._links.ask(
            self._giving, subject, self.scripts.refund(subject, units, charged_ns, self.stamp)
        )

    def owe(self, subject: str, units: int) -> int | Ask:
        """Charge units in full, in one round trip; return what was forgiven. See Counter.owe."""
        scripts = self.scripts.of_units()
        return self._links.ask(self._owing, scripts, subject, units) if units and scripts else 0

    def owed(self, subject: str) -> Ask:
        """Return the units that a limit owes now."""
        return self._links.ask(self._looking, subject)

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> Ask | None:
        """Add extra units on top of every limit."""
        if not units:
            return None
        return self._links.ask(self._giving, subject, self.scripts.grant(subject, units, ttl_ns))

    def reset(self, subject: str) -> Ask:
        """Forget what the subject spent and was granted."""
        return self._links.ask(self._giving, subject, self.scripts.reset(subject))

    def _owing(
        self, driver: RedisDriver, scripts: RuleScripts, subject: str, units: int
    ) -> Steps[int]:
        try:
            reply = yield from driver.running(scripts.owe(subject, units))
        finally:  # a denial that is known here may end later now
            self._cache.drop(subject)
        return forgiven_in(reply)

    def _looking(self, driver: RedisDriver, subject: str) -> Steps[int]:
        call = self.scripts.peek(subject, 0, self.scripts.now()[0])
        reply = yield from driver.running(call)
        try:
            return self.scripts.decoder.owed(reply)
        except (IndexError, TypeError, StopIteration) as error:
            raise unknown_reply(reply) from error

    def _giving(self, driver: RedisDriver, subject: str, call: ScriptCall) -> Steps[None]:
        """Run a refund, a grant or a reset."""
        try:
            yield from driver.running(call)
        finally:  # also if it failed or was cancelled: the server may have run it
            self._cache.drop(subject)


# ── Several slots ──────────────────────────────────────────────────────────────────────────────


class _Slot:
    """The charges of one slot of a cluster: a group of the decider."""

    def __init__(self, links: Links, terms: Terms | None, leases: Leases | None) -> None:
        self._links = links
        self._terms = terms
        self._leases = leases
        self._group: CheckGroup | None = None

    def decide(self, charges: Sequence[Charge], optional: Container[int]) -> Ask:
        """Charge all of them, or none."""
        made = script_charges(charges, optional, self._terms)
        self._group = group = CheckGroup(self._links, made, raises=True, leases=self._leases)
        return self._links.joint_ask(group)

    def undo(self) -> Ask | None:
        """Return what was charged."""
        group = self._group
        return self._links.ask(group.undoing) if group is not None and group.is_charged else None


def script_charges(
    charges: Sequence[Any], optional: Container[int], terms: Terms | None = None
) -> list[ScriptCharge]:
    """Return the charges of counters of this store as the scripts have them."""
    made: list[ScriptCharge] = []
    for at, (counter, subject, cost) in enumerate(charges):
        scripts = counter.scripts
        asked = None if terms is None else terms[scripts.encoded, subject]
        stamp = counter.stamp
        made.append(ScriptCharge(scripts, subject, cost, at in optional, 1, asked, stamp))
    return made


def check_together(
    links: Links,
    charges: Sequence[Charge],
    optional: Container[int],
    terms: Terms | None = None,
    leases: Leases | None = None,
) -> list[Answer] | Ask:
    """Check several subjects; all pass or none is charged. See Store.check_together."""
    slots = _slots(links, charges) if links.servers.clustered else {}
    if len(slots) <= 1:
        made = script_charges(charges, optional, terms)
        return Ask(links.wait, links.send, CheckGroup(links, made, leases=leases))
    error = _open_breaker(links, charges, optional)
    if error is not None:
        return [error] * len(charges)
    # The lowest limit first: it is the most likely to deny, and then no other slot is charged.
    places = sorted(slots.values(), key=lambda own: min([_room_max(charges[at]) for at in own]))
    groups = []
    for own in places:
        slot = _Slot(links, terms, leases)
        groups.append(Group(slot.decide, own, slot.undo))
    return asking(deciding, groups, charges, optional)


def _slots(links: Links, charges: Sequence[Any]) -> dict[int, list[int]]:
    """Return the positions of the charges by their slots."""
    slots: dict[int, list[int]] = {}
    for at, (counter, subject, _) in enumerate(charges):
        slots.setdefault(links.servers.slot(counter.scripts.key(subject)), []).append(at)
    return slots


def _open_breaker(
    links: Links, charges: Sequence[Any], optional: Container[int]
) -> StoreError | None:
    """Return the error of a server whose breaker is open, if a charge that needs it is in vain.

    Otherwise the healthy servers would be charged, and return the units.
    """
    if links.servers.breakers.any_open:
        for at, (counter, subject, _) in enumerate(charges):
            try:
                if at not in optional:
                    links.servers.require_closed(counter.scripts.key(subject))
            except StoreError as error:
                return error
    return None


def _room_max(charge: Charge) -> float:
    """Return how many such checks an untouched quota has room for."""
    counter, _, cost = charge
    return min([limit.capacity for limit in counter.limits]) / (cost or 1)


# ── Reports ────────────────────────────────────────────────────────────────────────────────────


def reporting(driver: RedisDriver, reports: Sequence[ReportAttempt]) -> Steps[list[Answer]]:
    """Send the reports of a node in one batch for each server; return their answers, in order."""
    servers, cache = driver.servers, driver.cache
    now, early_ns = reports[0].scripts.now()
    groups: dict[tuple[int, int], list[int]] = {}
    for at, each in enumerate(reports):
        slot = servers.slot(each.scripts.key(each.subject))
        part = 0 if servers.clustered else at // REPORTS_MAX
        groups.setdefault((slot, part), []).append(at)
    calls = [report_call([reports[at] for at in group], now) for group in groups.values()]
    try:
        replies = yield from driver.running_all(calls)
    finally:  # also if it failed: the server may have taken the units back
        for each in reports:
            cache.drop(each.subject)
    answers: dict[int, Answer] = {}
    for group, reply in zip(groups.values(), replies, strict=True):
        for at, found in zip(group, charge_replies(reply, len(group)), strict=True):
            answers[at] = _reported(driver, reports[at].scripts, found, early_ns)
    return [answers[at] for at in range(len(reports))]


def _reported(driver: RedisDriver, scripts: RuleScripts, reply: Any, early_ns: int) -> Answer:
    if isinstance(reply, ReplyError):
        return driver.servers.error_of(reply)
    if isinstance(reply, StoreError):
        return reply
    try:
        if type(reply) is not list:
            raise unknown_reply(reply)
        return scripts.decoder.peek(reply, 0, early_ns)
    except StoreError as error:
        return error


def forgiven_in(reply: Any) -> int:
    """Return the units that were forgiven, from the reply of owe.lua."""
    if type(reply) is not list or len(reply) != 1 or type(reply[0]) is not int:
        raise unknown_reply(reply)
    return reply[0]


def unknown_reply(reply: object) -> StoreUnavailable:
    """Return the error of a reply that the script cannot give."""
    return StoreUnavailable(
        f"not a reply of Redis: {show(reply)}; the call may have been counted once"
    )
