"""The scripts that run inside Redis, and the calls of them.

Each script is some `.lua` files, one after the other. `COUNTS`, `LOGS`, `SLOTS` and `LEASES` are
one text (`lua/check.lua`) with more or fewer sections; the rule chooses, because each function that
a script makes takes time. `OWE` charges in full, `REFUND` returns units to limits other than logs,
and `CHANGE` and `CHANGE_SLOTS` do all other changes. Of a rule that counts requests in flight
(`SLOTS`), no node has leases. A server identifies a script by the SHA-1 of its text, so two
versions of Ratekeeper on one server never run each other's scripts.

`batch_call` decides several *groups* in one call. A group is a list of `ScriptCharge`: the charges
of one request. The groups are decided in order, and each of them alone: every charge of a group
has room, or none is made. In a cluster, all keys of a call are in one slot.

- A charge that fails (its state has another type, is damaged or full) has an error as its reply,
  and its group is not charged, unless the charge is `optional`. Other groups go on.
- A group of one charge may stand for several equal `requests` in a row. The script admits as many
  of them as have room.
- `CHARGES_MAX` bounds the charges of a call, because a script holds up its server.

`charge_replies` returns the reply of each charge in order: a list, or an error. The decoder of the
charge's rule reads it: `check` or `peek` for one request, `checks_in_turn` for several. A charge
that was allowed in a group that was not charged has the reply of an allowed check: the caller sees
that another charge of the group denies or fails, and reads it with `peek`. With lease terms, the
last `lease_numbers` of the reply are the lease, which `lease` reads.

A single check is the same call with one charge and no time: the script `RuleScripts.script`
with the keys, the gate and the cost. Its reply is that of the charge.

`RuleScripts` writes one rule's calls: which script, which key, which arguments. Nothing here does
I/O.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from itertools import product
from string import ascii_letters
from struct import Struct
from typing import Final, NamedTuple, cast

from hiredis import pack_command

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.model import IN_FLIGHT, UNITS_MAX, Limit
from ratekeeper.decide.algorithms.in_flight import NO_STAMP
from ratekeeper.decide.leasing import LeaseTerms, lifetime_ns
from ratekeeper.decide.stores.redis.codec import (
    FLIGHT,
    KINDS,
    LOG,
    NS_PER_US,
    BucketPlaces,
    Place,
    ReplyDecoder,
    encode_limits,
    encode_sequence,
)
from ratekeeper.decide.stores.redis.config import RedisConfig

# The time argument of a script: microseconds from a test's clock, or SERVER_TIME.
ScriptTime = bytes | int
SERVER_TIME: Final = b""
SERVER_NOW: Final = (SERVER_TIME, 0)
_LOOK: Final = b"look"
# The verbs of lua/change.lua.
_REFUND, _UNDO, _BACK, _LATE, _GRANT, _RESET = range(1, 7)
# The numbers of a refund as msgpack, in a fifth of the time of `encode_sequence`.
_REFUND_NUMBERS: Final = Struct(">BBQBQ")
_UINT64: Final = 0xCF
# In Lua: no text of a script contains such an operator between spaces, or a bracket beside one.
# Two are left alone: a number before `..` would end in a point, and `- -` would begin a comment.
_SPACED: Final = re.compile(
    rb" ?([=+*/<>~,%]+) ?|(?<![0-9]) (\.\.) | (-) (?!-)|(?<=[\])}]) (?=[a-z])| (?=[\[({#])"
)
_LOCALS: Final = re.compile(rb"\blocal (?:function )?([a-z_,]+)")
# Local variables with the names of library functions.
_LIBRARY: Final = frozenset((b"call", b"ceil", b"floor", b"function", b"max", b"min"))
_KEYWORDS: Final = frozenset((b"do", b"if", b"in", b"or"))
# A word outside a text.
_WORD: Final = re.compile(rb"(?<!')\b\w+\b(?!')")
# A line of a script that names numbers, all of them in capitals.
_CONSTANTS: Final = re.compile(rb"^local ([A-Z_,]+)=([0-9,]+)\n", re.MULTILINE)
# The charges that one call may have: at about 3 us each, other calls wait 100 us for it.
CHARGES_MAX: Final = 32
# An amount is a cost below this, plus this times a code: see `batch_call`.
_AMOUNT_CODES: Final = 2**31
_COST_MAX: Final = _AMOUNT_CODES - 1  # above every capacity with a grant
_ONE: Final = b"$1\r\n1\r\n"
_TIME_MAX: Final = 2**52  # microseconds; 142 years


@dataclass(frozen=True, slots=True)
class LuaScript:
    """A script's text, and the SHA-1 that a server knows it by."""

    text: bytes
    sha: bytes
    reply: type[list[object] | int] = int
    """What it replies with: an array or a number."""


def _text_of(name: str, features: Sequence[str] = ()) -> bytes:
    """Return a Lua file without comments, indentation and spaces around operators.

    Lines between `--@ if feature` and `--@ end` are only in scripts with that feature. A line
    `--@ name` stands for another file: functions that only one branch needs.

    A client that is not logged in may send at most 16 KiB in one argument. Redis closes the
    connection after a longer one, and the client would not see that it must log in (NOAUTH).
    """
    folder = files("ratekeeper.decide.stores.redis").joinpath("lua")
    kept, sections = [], [True]
    for raw in folder.joinpath(f"{name}.lua").read_bytes().splitlines():
        line = raw.strip()
        if line == b"--@ end":
            sections.pop()
        elif line.startswith(b"--@ if "):
            sections.append(line[7:].decode() in features)
        elif line.startswith(b"--@ "):
            if all(sections):
                kept.append(_text_of(line[4:].decode(), features))
        elif line and all(sections) and line[:2] != b"--":
            kept.append(_SPACED.sub(rb"\1\2\3", line.partition(b" -- ")[0]))
    return b"\n".join(kept)


def _without_constants(text: bytes) -> bytes:
    """Return a script with the numbers instead of their names: shorter, and faster to run."""
    values: dict[bytes, bytes] = {}
    for found in _CONSTANTS.finditer(text):
        values.update(zip(found[1].split(b","), found[2].split(b","), strict=True))
    text = _CONSTANTS.sub(b"", text)
    return _WORD.sub(lambda name: values.get(name[0], name[0]), text)


def _with_short_names(text: bytes) -> bytes:
    """Return a script whose local variables have names of one or two characters.

    The most frequent ones have the shortest names. A field of a table that has the name of a
    variable is renamed with it.
    """
    uses = Counter(_WORD.findall(text))
    names = {name for found in _LOCALS.findall(text) for name in found.split(b",")}
    long = sorted(name for name in names - _LIBRARY if len(name) > 1)
    taken = {*re.findall(rb"\w+", text), *_KEYWORDS}
    letters = ascii_letters.encode()
    every = (bytes(each) for size in (1, 2) for each in product(letters, repeat=size))
    free = (name for name in every if name not in taken)
    short = dict(zip(sorted(long, key=lambda name: -uses[name]), free, strict=False))
    return _WORD.sub(lambda name: short.get(name[0], name[0]), text)


def _script_named(
    *names: str, features: Sequence[str] | None = None, reply: type[list[object] | int] = int
) -> LuaScript:
    """Return the script of these files, one after the other."""
    text = _without_constants(b"\n".join(_text_of(name, features or ()) for name in names))
    if features is not None:
        text = _with_short_names(text)
    # Redis identifies scripts by SHA-1; it protects no secret.
    return LuaScript(text, sha1(text, usedforsecurity=False).hexdigest().encode(), reply)


_COUNTS: Final = ("arithmetic", "state", "holds")
_LOGS: Final = ("arithmetic", "state", "holds", "rings")
_EVERYTHING: Final = ("logs", "leases")
COUNTS: Final = _script_named(*_COUNTS, "check", features=(), reply=list)
LOGS: Final = _script_named(*_LOGS, "check", features=("logs",), reply=list)
SLOTS: Final = _script_named(*_LOGS, "check", features=("logs", "slots", "check"), reply=list)
LEASES: Final = _script_named(*_LOGS, "check", features=_EVERYTHING, reply=list)
CHANGE: Final = _script_named(*_LOGS, "refunded", "change", features=_EVERYTHING, reply=list)
# Nodes lease nothing of a rule that counts requests in flight.
CHANGE_SLOTS: Final = _script_named(
    *_LOGS, "refunded", "change", features=("logs", "slots", "meets"), reply=list
)
REFUND: Final = _script_named(*_COUNTS, "refunded", "refund", features=(), reply=list)
OWE: Final = _script_named(*_COUNTS, "owe", features=(), reply=list)
OWE_LOGS: Final = _script_named(*_LOGS, "owe", features=("logs",), reply=list)

# Of limits that regions share.
_CHECK: Final = ("arithmetic", "regional", "regional_check")
REGIONAL_CHECK: Final = _script_named(*_CHECK, reply=list)
_REGIONAL: Final = ("arithmetic", "regional", "regional_state")
_GIVE: Final = ("regional_back", "regional_give")
REGIONAL_CHANGE: Final = _script_named(*_REGIONAL, *_GIVE, "regional_change", reply=list)
REGIONAL_USAGE: Final = _script_named(*_REGIONAL, "regional_back", "regional_usage", reply=list)
REGIONAL_LEARN: Final = _script_named(*_REGIONAL, *_GIVE, "regional_learn", reply=list)
REGIONAL_ACCEPT: Final = _script_named(*_REGIONAL, "regional_back", "regional_accept", reply=list)
REGIONAL_REPORT: Final = _script_named(*_REGIONAL, "regional_back", "regional_report", reply=list)
REGIONAL_GROUP: Final = _script_named("regional_group", reply=list)
REGIONAL_LEADER: Final = _script_named("regional_leader", reply=list)

CELL: Final = _script_named("cell", reply=list)
MARKS: Final = _script_named("marks")


# The stub of hiredis takes no tuples.
_packed: Final = cast("Callable[[tuple[str | bytes | int, ...]], bytes]", pack_command)


def pack(*parts: str | bytes | int) -> bytes:
    """Return the bytes of one command in the Redis protocol."""
    return _packed(parts)


class ScriptCall(NamedTuple):
    """A script to run on one hash, or on several hashes of one slot."""

    script: LuaScript
    key: bytes
    arguments: tuple[bytes | int, ...]
    more_keys: tuple[bytes, ...] = ()

    def by_sha(self) -> bytes:
        """Return the command that names the script."""
        keys = (self.key, *self.more_keys)
        return _packed(("EVALSHA", self.script.sha, len(keys), *keys, *self.arguments))

    def by_text(self) -> bytes:
        """Return the command that contains the script, for a server that does not know it yet."""
        keys = (self.key, *self.more_keys)
        return pack("EVAL", self.script.text, len(keys), *keys, *self.arguments)

    def size(self) -> int:
        """Return about how many bytes the command has that names the script."""
        parts = (self.key, *self.more_keys, *self.arguments)
        return 80 + sum(6 + (len(each) if isinstance(each, bytes) else 8) for each in parts)


class RuleScripts:
    """The script calls of one rule's limits.

    Redis decides by its own clock, which is the same for all nodes. A `clock` that is not the
    system's is a test's, and its time is sent along.
    """

    __slots__ = (
        "_check",
        "_clock",
        "_made_of",
        "by_server_clock",
        "decoder",
        "encoded",
        "field",
        "place",
        "script",
    )

    place: Callable[[str], Place]
    """Return the place of a subject's states."""

    def __init__(
        self, limits: tuple[Limit, ...], rule: str, config: RedisConfig, clock: Clock
    ) -> None:
        self.decoder = ReplyDecoder(limits, rule)
        self._made_of = (limits, rule, config, clock)
        kinds = {KINDS[each.algorithm] for each in limits}
        self.script = SLOTS if FLIGHT in kinds else LOGS if LOG in kinds else COUNTS
        self._clock = clock
        self.by_server_clock = type(clock) is SystemClock
        self.field = rule.encode()
        self.encoded = encode_limits(limits) + self.field
        self.place = BucketPlaces(limits, rule, config.prefix, config.hash_key).of
        # The command of a check of one key, to be filled in: in a fifth of the time of `pack`. The
        # gates of all subjects have one length.
        head = pack("EVALSHA", self.script.sha, 1).replace(b"*3", b"*6", 1)
        self._check = head + b"$%%d\r\n%%b\r\n$%d\r\n%%b\r\n%%b" % len(self.place("")[1])

    def of_units(self) -> RuleScripts | None:
        """Return the calls of the limits that count units; None if there are none."""
        if self.script is not SLOTS:
            return self
        limits, rule, config, clock = self._made_of
        counted = tuple(limit for limit in limits if limit.algorithm != IN_FLIGHT)
        return RuleScripts(counted, rule, config, clock) if counted else None

    def now(self) -> tuple[ScriptTime, int]:
        """Return the time argument of a script, and the caller's nanoseconds past it."""
        if self.by_server_clock and switches.clock is None:
            return SERVER_NOW
        now_ns = max(self._clock.now_ns(), 0)
        return now_ns // NS_PER_US, now_ns % NS_PER_US

    def lease_arguments(self, terms: LeaseTerms, cost: int) -> tuple[int, int, int]:
        """Return the units to lease, twice the nodes, and how long, in microseconds."""
        lasts_us = lifetime_ns(self.decoder.limits, terms.lifetime_ns) // NS_PER_US
        wanted = min(terms.wanted, UNITS_MAX) if lasts_us and cost else 0
        return wanted, 2 * terms.nodes, lasts_us

    def key(self, subject: str) -> bytes:
        """Return the key that the slot of a subject's states follows from."""
        return self.place(subject)[0][0]

    def _changed(self, subject: str, stamp: int, verb: int, *numbers: int) -> ScriptCall:
        (keys, gate), change = self._change(subject, verb, *numbers)
        call = _change_call([((keys, with_stamp(gate, stamp)), change)], self.now()[0])
        return call._replace(script=CHANGE_SLOTS) if self.script is SLOTS else call

    def _change(self, subject: str, verb: int, *numbers: int) -> tuple[Place, bytes]:
        return self.place(subject), encode_sequence((verb, *numbers))

    def check_command(self, subject: str, cost: int, *, spend: bool = True) -> tuple[bytes, bytes]:
        """Return the key and the command of `batch_call` for one charge by the server's clock."""
        keys, gate = self.place(subject)
        key = keys[0]
        if spend and cost == 1 and len(keys) == 1:
            return key, self._check % (len(key), key, gate, _ONE)
        cost = min(cost, _COST_MAX)
        if spend and len(keys) == 1:
            units = b"%d" % cost
            return key, self._check % (len(key), key, gate, b"$%d\r\n%b\r\n" % (len(units), units))
        arguments = (gate, cost) if spend else (gate, cost, _LOOK)
        return key, _packed(("EVALSHA", self.script.sha, len(keys), *keys, *arguments))

    def peek(self, subject: str, cost: int, now: ScriptTime) -> ScriptCall:
        """Return the call that decides as `check` would, and spends nothing."""
        return batch_call([[ScriptCharge(self, subject, cost)]], now, spend=False)

    def refund(
        self, subject: str, units: int, charged_ns: int | None, stamp: int = NO_STAMP
    ) -> ScriptCall:
        """Return the call that gives units back, charged at this time of the server's clock."""
        charged = 0 if charged_ns is None else max(charged_ns, 0) // NS_PER_US + 1
        units = min(units, UNITS_MAX)
        if self.script is not COUNTS:
            return self._changed(subject, stamp, _REFUND, units, charged)
        change = _REFUND_NUMBERS.pack(_REFUND, _UINT64, units, _UINT64, charged)
        return self._call(REFUND, subject, change)

    def undo(self, subject: str, reply: list[int], cost: int, stamp: int = NO_STAMP) -> ScriptCall:
        """Return the call that gives back exactly the units that a check took, and its slot.

        A slot that the request had before the check is not freed.
        """
        stamp = NO_STAMP if self.decoder.renews(reply) else stamp
        return self._changed(subject, stamp, _UNDO, *self.decoder.spent(reply, cost))

    def owe(self, subject: str, units: int) -> ScriptCall:
        """Return the call that charges units in full."""
        return self._call(OWE if self.script is COUNTS else OWE_LOGS, subject, units)

    def _call(self, script: LuaScript, subject: str, argument: bytes | int) -> ScriptCall:
        """Return the call of a script with one argument beside the gate."""
        keys, gate = self.place(subject)
        now = self.now()[0]
        arguments = (gate, argument) if now == SERVER_TIME else (gate, argument, now)
        return ScriptCall(script, keys[0], arguments, keys[1:])

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> ScriptCall:
        """Return the call that adds extra units."""
        # Rounded up: a grant never ends before the promised time.
        ttl = 0 if ttl_ns is None else min(-(-ttl_ns // NS_PER_US), _TIME_MAX) + 1
        return self._changed(subject, NO_STAMP, _GRANT, min(units, UNITS_MAX), ttl, UNITS_MAX)

    def reset(self, subject: str) -> ScriptCall:
        """Return the call that deletes what the subject spent and was granted."""
        return self._changed(subject, NO_STAMP, _RESET)

    def report(self, report: ReportAttempt) -> tuple[Place, bytes]:
        """Return the change of a report."""
        verb = _LATE if report.is_late else _BACK
        return self._change(report.subject, verb, min(report.units, UNITS_MAX), report.time_us)


def with_stamp(gate: bytes, stamp: int) -> bytes:
    """Return a gate for one request."""
    return gate + encode_sequence((stamp,)) if stamp else gate


class ScriptCharge(NamedTuple):
    """One charge of a group; see `batch_call`."""

    scripts: RuleScripts
    subject: str
    cost: int
    optional: bool = False
    """The others of its group are charged even if this one fails. A denial counts."""
    requests: int = 1
    """The equal requests in a row that this stands for; above 1 only if it is a group alone."""
    terms: LeaseTerms | None = None
    """The terms of a lease, for all charges of a call or for none. Then `requests` is 1."""
    stamp: int = NO_STAMP
    """Of the request, if a limit counts requests in flight. Then `requests` is 1, too."""


def batch_call(
    groups: Sequence[Sequence[ScriptCharge]], now: ScriptTime, *, spend: bool
) -> ScriptCall:
    """Return the call that decides groups of charges; in each of them, all are made or none.

    `now` comes from `RuleScripts.now`. Without `spend`, the script only looks. In a cluster, all
    subjects must be in one slot (`RuleScripts.key`).
    """
    keys: list[bytes] = []
    arguments: list[bytes | int] = []
    script = COUNTS
    for group in groups:
        for at, charge in enumerate(group):
            of_charge, gate = charge.scripts.place(charge.subject)
            keys += of_charge
            if spend and charge.terms is not None:
                script = LEASES
                gate += encode_sequence(charge.scripts.lease_arguments(charge.terms, charge.cost))
            elif script is COUNTS or charge.scripts.script is SLOTS:
                script = charge.scripts.script
            if charge.stamp:
                gate = with_stamp(gate, charge.stamp)
            code = (at > 0) + 2 * charge.optional + 4 * (charge.requests - 1)
            arguments += [gate, min(charge.cost, _COST_MAX) + _AMOUNT_CODES * code]
    if now != SERVER_TIME or not spend:
        moment = b"%d" % now if isinstance(now, int) else now
        arguments.append(moment if spend else _LOOK + moment)
    return ScriptCall(script, keys[0], tuple(arguments), tuple(keys[1:]))


def charge_replies(reply: object, charges: int) -> list[object]:
    """Return the reply of each charge of a call, in order.

    The reply of a call for one charge is that charge's. An error of the whole call, or a reply that
    is no list of as many, is the reply of every charge.
    """
    if charges > 1 and type(reply) is list and len(reply) == charges:
        return cast("list[object]", reply)
    return [reply] * charges


class ReportAttempt(NamedTuple):
    """One report of a node: units of a lease that it gives back, or units that it has admitted."""

    scripts: RuleScripts
    subject: str
    units: int
    is_late: bool
    time_us: int
    """The end of the lease, or the age of the units."""


def report_call(reports: Sequence[ReportAttempt], now: ScriptTime) -> ScriptCall:
    """Return the call for several reports whose keys are in one slot."""
    return _change_call([each.scripts.report(each) for each in reports], now)


def _change_call(changes: Sequence[tuple[Place, bytes]], now: ScriptTime) -> ScriptCall:
    keys: list[bytes] = []
    arguments: list[bytes | int] = []
    for (of_change, gate), change in changes:
        keys += of_change
        arguments += [gate, change]
    if now != SERVER_TIME:
        arguments.append(now)
    return ScriptCall(CHANGE, keys[0], tuple(arguments), tuple(keys[1:]))
