"""Limits that several regions share, in the Redis of one region.

The scripts `lua/regional*.lua` agree with the reference (`decide/regional.py`), call for call. A
subject has one key for each global rule, because its state is too long for a packed bucket:

    <prefix>:{%r<group>}:<rule number>:<subject>  the state, a string
    <prefix>:{%r<group>}:due                      the subjects of the group to report, by time
    <prefix>:{%r<group>}:shares                   the shares of this region, and the fencing token
    <prefix>:{%r}:leader, <prefix>:{%r}:notes     the leader of the region, and its notes

The keys of a group are in one slot, so a check is one script call, and always sees the shares in
use. There are 64 groups, so that a cluster can spread them over its servers. The calls of a sync
are one call for each group, or several if they are long, and all of them leave together.

No denial is cached: an accepted total may give room at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.errors import ConfigError, StoreError, StoreUnavailable, show
from ratekeeper.core.model import (
    BUCKETS,
    MICROS_PER_UNIT,
    UNITS_MAX,
    AlgorithmName,
    Decision,
    Limit,
    Limits,
)
from ratekeeper.core.steps import Ask, Steps, run_async
from ratekeeper.decide.ledgers import BucketLedger, Ledger, LogLedger, WindowLedger
from ratekeeper.decide.regional import (
    GROUPS,
    LAYOUT,
    NO_SHARE,
    ROUND_NS,
    Accepted,
    AcrossRegions,
    GlobalCounter,
    Learnt,
    RegionalUsage,
    RegionPart,
    Report,
    Shares,
    SubjectKey,
    decision_of,
    require_room,
    rule_number,
)
from ratekeeper.decide.stores.redis.codec import (
    NS_PER_US,
    encode_numbers,
    encode_sequence,
    refill_per_us,
)
from ratekeeper.decide.stores.redis.config import Address, RedisConfig
from ratekeeper.decide.stores.redis.driver import Links, RedisDriver
from ratekeeper.decide.stores.redis.scripts import (
    REGIONAL_ACCEPT,
    REGIONAL_CHANGE,
    REGIONAL_CHECK,
    REGIONAL_GROUP,
    REGIONAL_LEADER,
    REGIONAL_LEARN,
    REGIONAL_REPORT,
    REGIONAL_USAGE,
    SERVER_TIME,
    LuaScript,
    ScriptCall,
    ScriptTime,
)

T = TypeVar("T")

# States in one call: a script holds up all other calls of its server.
STATES_MAX: Final = 64
# A share has at most this denominator; the scripts multiply two of them.
SHARE_PARTS_MAX: Final = 1_000_000
NOTES_MAX: Final = 64
NOTE_BYTES_MAX: Final = 65_536
# Numbers of a report are cut to this: above, the scripts could not count exactly.
_NUMBER_MAX: Final = 9 * 10**15
_DEMAND_MAX: Final = 10**12
_RULE_CHARACTERS: Final = 16

# The kinds of the gate, as in regional.lua.
_KINDS: Final[dict[AlgorithmName, int]] = {
    "token_bucket": 1,
    "leaky_bucket": 2,
    "fixed_window": 3,
    "sliding_window_counter": 4,
    "sliding_window_log": 5,
}
_ALGORITHMS: Final = {kind: name for name, kind in _KINDS.items()}
_MODES: Final[tuple[AcrossRegions, ...]] = ("exact", "eventual")
_GATE_MODE, _GATE_FIRST, _GATE_STEP = 1, 3, 6
# The payloads of a check are prepared for costs below this.


# ── Limits, states and replies ─────────────────────────────────────────────────────────────────


@lru_cache(maxsize=1_024)
def encode_gate(limits: Limits, across: AcrossRegions) -> bytes:
    """Return the mode and the limits, as the scripts read them."""
    numbers = [_MODES.index(across), max(limit.window_ns for limit in limits) // NS_PER_US]
    for limit in limits:
        numbers += [
            _KINDS[limit.algorithm],
            limit.capacity,
            *refill_per_us(limit),
            limit.window_ns // NS_PER_US,
            max(limit.refill_step_ns // NS_PER_US, 1),
        ]
    packed = encode_sequence(numbers)
    return len(packed).to_bytes(2) + packed


@lru_cache(maxsize=1_024)
def decode_gate(numbers: tuple[int, ...]) -> tuple[Limits, AcrossRegions]:
    """Return the limits and the mode. The limits have no names: the scripts do not know them."""
    limits = []
    for at in range(_GATE_FIRST, len(numbers), _GATE_STEP):
        kind, capacity, numerator, denominator, window_us, step_us = numbers[at : at + _GATE_STEP]
        algorithm = _ALGORITHMS[kind]
        units = numerator * window_us // (denominator * MICROS_PER_UNIT)
        is_bucket = algorithm in {"token_bucket", "leaky_bucket"}
        limits.append(
            Limit(
                units,
                per=_seconds(window_us),
                algorithm=algorithm,
                capacity=capacity if is_bucket else 0,
                refill_every=_seconds(step_us) if step_us > 1 else 0,
            )
        )
    return tuple(limits), _MODES[numbers[_GATE_MODE]]


def _seconds(us: int) -> float:
    return us // 1_000_000 if us % 1_000_000 == 0 else us / 1_000_000


class _Share(NamedTuple):
    """The share in a reply, in lowest terms or not."""

    numerator: int
    denominator: int


_share_of = lru_cache(maxsize=1_024)(_Share)


def _ledger_of(limit: Limit, numbers: Sequence[int]) -> Ledger:
    """Return the ledger in a reply, whose times are microseconds."""
    if limit.algorithm in BUCKETS:
        last_us, known, own = numbers
        return BucketLedger(limit, last_us * NS_PER_US, known, own)
    if limit.algorithm == "sliding_window_log":
        leaves_ns = [each * NS_PER_US for each in numbers[::3]]
        return LogLedger(limit, list(zip(leaves_ns, numbers[1::3], numbers[2::3], strict=True)))
    number, known, own, known_before, own_before = numbers
    return WindowLedger(limit, number, (known, own, known_before, own_before))


def charged_decision(
    limit: Limit,
    across: AcrossRegions,
    parts: int,
    whole: int,
    now_us: int,
    numbers: Sequence[int],
    cost: int,
    rule: str,
) -> Decision | None:
    """Return the decision on a request that was charged to one limit, without granted units.

    The same as `decision_of`, for the usual case: a third of the time, because a charge has brought
    the ledger to now. None if it has not (the clock was set back, or a bucket is refilled in
    steps), and for a log.
    """
    algorithm, now_ns, delay_ns = limit.algorithm, now_us * NS_PER_US, 0
    exact = across == "exact"
    # Own units of an eventual limit are accepted soon, and then drain at the whole rate.
    drains, of = (parts, whole) if exact else (1, 1)
    if algorithm in BUCKETS:
        last_us, known, own = numbers
        if last_us != now_us:
            return None
        step_ns = limit.refill_step_ns
        rate = drains * limit.micros_numerator * step_ns
        over = drains * (known + 1) + of * (own + 1)
        reset_ns = -(-over * limit.ns_denominator // rate) * step_ns
        most = cost * of * MICROS_PER_UNIT
        if algorithm == "leaky_bucket" and drains * known + of * own > most:
            delay_ns = -(-(over - most) * limit.ns_denominator // rate) * step_ns
    elif algorithm == "sliding_window_log":
        return None
    else:
        number, known, own, known_before, own_before = numbers
        window_ns = limit.window_ns
        reset_ns = (number + 1) * window_ns - now_ns
        if reset_ns > window_ns:
            return None
        if known_before or own_before:
            known -= -known_before * reset_ns // window_ns  # rounds up
            own -= -own_before * reset_ns // window_ns
        if algorithm == "sliding_window_counter":
            reset_ns += window_ns
    left = limit.capacity * MICROS_PER_UNIT - known
    if exact or parts == whole:
        room = (left * parts // whole - own) // MICROS_PER_UNIT
    else:
        part = -(-left * parts // (whole * MICROS_PER_UNIT))
        room = (part * MICROS_PER_UNIT - own) // MICROS_PER_UNIT
    return Decision(
        True,
        limit,
        room if room > 0 else 0,
        0,
        -(-reset_ns // NS_PER_US) * NS_PER_US,
        delay_ns,
        rule,
        False,
        now_ns,
        now_ns,
    )


def denied_by_bucket(
    limit: Limit,
    across: AcrossRegions,
    parts: int,
    whole: int,
    now_us: int,
    numbers: Sequence[int],
    cost: int,
    rule: str,
) -> Decision | None:
    """Return the decision on a request that one bucket has denied, without granted units.

    The same as `decision_of`, in half the time. None for a bucket that is refilled in steps, a cost
    that never fits, and a clock that was set back.
    """
    exact, capacity = across == "exact", limit.capacity * MICROS_PER_UNIT
    micros = cost * MICROS_PER_UNIT
    never = micros * whole > parts * capacity if exact else micros > capacity
    if never or limit.refill_step_ns > 1:
        return None
    last_us, known, own = numbers
    now_ns, last_ns = now_us * NS_PER_US, last_us * NS_PER_US
    if now_ns < last_ns:
        return None
    numerator, denominator = limit.micros_numerator, limit.ns_denominator
    now_known = known - (now_ns - last_ns) * numerator // denominator
    now_own = unshared = own
    if now_known < 0:
        now_own = max(own - -now_known * parts // whole, 0)
        unshared = max(own + now_known, 0)
        now_known = 0
    left = capacity - now_known
    if exact:
        room = (left * parts // whole - now_own) // MICROS_PER_UNIT
        load = parts * now_known + whole * now_own
    else:
        if parts == whole:
            room = (left - now_own) // MICROS_PER_UNIT
        elif now_own or micros > left:
            part = -(-left * parts // (whole * MICROS_PER_UNIT))
            room = (part * MICROS_PER_UNIT - now_own) // MICROS_PER_UNIT
        else:
            return None
        # Own units of an eventual limit are accepted soon, and then drain at the whole rate.
        parts, whole, load = 1, 1, now_known + unshared
    most = max(parts * capacity - whole * micros, 0)
    over, rate = parts * (known + 1) + whole * (own + 1), parts * numerator
    wait_ns = reset_ns = 0
    if load > most:
        wait_ns = max(last_ns - (most - over) * denominator // rate - now_ns, 0)
    if load > 0:
        reset_ns = max(last_ns - -over * denominator // rate - now_ns, 0)
    reset_ns = max(reset_ns, wait_ns, 1)
    if wait_ns <= 1 and not exact:
        wait_ns = ROUND_NS
    wait_ns, reset_ns = -(-max(wait_ns, 1) // NS_PER_US), -(-reset_ns // NS_PER_US)
    fields = (False, limit, max(room, 0), wait_ns * NS_PER_US, reset_ns * NS_PER_US, 0, rule)
    return Decision(*fields, False, None, now_ns)


def denied_by_window(
    limit: Limit,
    across: AcrossRegions,
    parts: int,
    whole: int,
    now_us: int,
    numbers: Sequence[int],
    cost: int,
    rule: str,
) -> Decision | None:
    """Return the decision on a request that one window has denied, as `denied_by_bucket` does.

    None for a log, a cost that never fits, and counts of another window.
    """
    exact, capacity = across == "exact", limit.capacity * MICROS_PER_UNIT
    micros = cost * MICROS_PER_UNIT
    never = micros * whole > parts * capacity if exact else micros > capacity
    if never or limit.algorithm == "sliding_window_log":
        return None
    number, known, own, known_before, own_before = numbers
    now_ns, window_ns = now_us * NS_PER_US, limit.window_ns
    left_ns = (number + 1) * window_ns - now_ns
    if not 0 < left_ns <= window_ns:
        return None
    ledger = WindowLedger(limit, number, (known, own, known_before, own_before))
    if known_before or own_before:
        known -= -known_before * left_ns // window_ns  # rounds up
        own -= -own_before * left_ns // window_ns
    left = capacity - known
    if exact or parts == whole:
        room = (left * parts // whole - own) // MICROS_PER_UNIT
    elif own or micros > left:
        part = -(-left * parts // (whole * MICROS_PER_UNIT))
        room = (part * MICROS_PER_UNIT - own) // MICROS_PER_UNIT
    else:
        return None
    if not exact:
        parts = whole = 1
    drains, load = _share_of(parts, whole), parts * known + whole * own
    most = max(parts * capacity - whole * micros, 0)
    wait_ns = max(ledger.wait_ns(now_ns, drains, most, load), 1)
    reset_ns = max(ledger.wait_ns(now_ns, drains, 0, load), wait_ns)
    if wait_ns == 1 and not exact:
        wait_ns = ROUND_NS
    wait_ns, reset_ns = -(-wait_ns // NS_PER_US), -(-reset_ns // NS_PER_US)
    fields = (False, limit, max(room, 0), wait_ns * NS_PER_US, reset_ns * NS_PER_US, 0, rule)
    return Decision(*fields, False, None, now_ns)


def _invalid(reply: object) -> StoreUnavailable:
    return StoreUnavailable(f"the server's reply is not one of the script: {show(reply)}")


class _Keys:
    """The keys of a region in its Redis."""

    __slots__ = ("groups", "leader", "notes")

    def __init__(self, config: RedisConfig) -> None:
        prefix = config.prefix.encode()
        heads = [b"%b:{%%r%d}:" % (prefix, group) for group in range(GROUPS)]
        # Of each group: the subjects that are due, the shares, and the beginning of the states.
        self.groups = [(head + b"due", head + b"shares", head) for head in heads]
        self.leader = b"%b:{%%r}:leader" % prefix
        self.notes = b"%b:{%%r}:notes" % prefix

    def call(
        self,
        script: LuaScript,
        group: int,
        members: Iterable[bytes],
        *arguments: bytes | int,
    ) -> ScriptCall:
        """Return a call on the states of some subjects of a group."""
        due, shares, head = self.groups[group]
        states = [head + member for member in members]
        return ScriptCall(script, due, arguments, (shares, *states))


def _member(key: SubjectKey) -> bytes:
    """Return the end of the key of a state."""
    return f"{key.rule}:{key.subject}".encode()


def _key_of(member: bytes) -> SubjectKey:
    text = member.decode("utf-8", "replace")
    return SubjectKey(text[:_RULE_CHARACTERS], text[_RULE_CHARACTERS + 1 :])


# ── Gates ──────────────────────────────────────────────────────────────────────────────────────


class _GlobalRule:
    """One global rule's calls, and the decisions in their replies."""

    __slots__ = (
        "_across",
        "_encoded",
        "_groups",
        "_hash",
        "_number",
        "_rule",
        "limits",
        "now",
    )

    def __init__(
        self,
        limits: Limits,
        rule: str,
        across: AcrossRegions,
        keys: _Keys,
        now: Callable[[], ScriptTime],
    ) -> None:
        self.limits = limits
        self._rule = rule
        self._across: AcrossRegions = across
        self._encoded = encode_gate(limits, across)
        self._groups = keys.groups
        self.now = now
        number = rule_number(limits, rule)
        self._number = number.encode() + b":"
        # The hash of SubjectKey.group, as far as the rule goes.
        self._hash = blake2b(SubjectKey(number, "").group_text.encode(), digest_size=2)

    def keys_of(self, subject: str) -> tuple[bytes, bytes, bytes]:
        """Return the subjects that are due, the shares, and the state of the subject."""
        name, hashed = subject.encode(), self._hash.copy()
        hashed.update(name)
        due, shares, head = self._groups[int.from_bytes(hashed.digest()) % GROUPS]
        return due, shares, b"%b%b%b" % (head, self._number, name)

    def call(self, script: LuaScript, subject: str, *arguments: bytes | int) -> ScriptCall:
        """Return a call on the state of a subject."""
        due, shares, state = self.keys_of(subject)
        return ScriptCall(script, due, (self.now(), self._encoded, *arguments), (shares, state))

    def checking(self, driver: RedisDriver, subject: str, cost: int) -> Steps[Decision]:
        """Charge a request, if it has room."""
        call = self.call(REGIONAL_CHECK, subject, cost)
        reply = yield from driver.running(call)
        return self.decision(subject, reply, cost, spend=True)

    def peeking(self, driver: RedisDriver, subject: str, cost: int) -> Steps[Decision]:
        """Decide a request, but charge nothing."""
        call = self.call(REGIONAL_CHECK, subject, cost, b"look")
        reply = yield from driver.running(call)
        return self.decision(subject, reply, cost, spend=False)

    def decision(self, subject: str, reply: list[Any], cost: int, *, spend: bool) -> Decision:
        """Return the decision in the reply to a check. Raises CapacityError, StoreUnavailable."""
        try:
            decision = self._decision(reply, cost, spend=spend)
        except (AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
            self.require_readable(subject, reply)
            raise _invalid(reply) from error
        if decision.allowed is not (reply[0] >= 0):
            raise StoreUnavailable(
                f"the server and this library disagree about {show(reply)} at a cost of {cost}; "
                f"this is a defect of Ratekeeper, please report it"
            )
        return decision

    def require_readable(self, subject: str, reply: list[Any]) -> None:
        """Raise StoreUnavailable if the region has no share, or if the state is unreadable."""
        if not reply:
            raise StoreUnavailable(NO_SHARE)
        if type(reply[0]) is bytes:
            key = self.keys_of(subject)[2].decode("utf-8", "replace")
            raise StoreUnavailable(
                f"the value of the key {show(key)} cannot be used: {reply[0].decode()}; if no "
                f"other version of Ratekeeper uses this Redis, reset the subject"
            )

    def _decision(self, reply: list[Any], cost: int, *, spend: bool) -> Decision:
        limits = self.limits
        now_us, parts, whole, granted, *numbers = reply
        passed = now_us >= 0
        if not passed:
            now_us = ~now_us
        if spend and cost and not granted and len(limits) == 1:
            decide = charged_decision
            if not passed:
                decide = denied_by_bucket if limits[0].algorithm in BUCKETS else denied_by_window
            decision = decide(
                limits[0], self._across, parts, whole, now_us, numbers, cost, self._rule
            )
            if decision is not None:
                return decision
        share = _share_of(parts, whole)
        if not passed:
            require_room(limits, share if self._across == "exact" else 1, cost - granted)
        if len(limits) == 1:
            ledgers = [_ledger_of(limits[0], numbers)]
        else:
            ledgers = [_ledger_of(*each) for each in zip(limits, numbers, strict=True)]
        return decision_of(
            limits,
            ledgers,
            self._across,
            share,
            now_us * NS_PER_US,
            cost,
            self._rule,
            charged=spend and passed and cost > 0,
            granted=granted,
            step_ns=NS_PER_US,
        )

    def changing(
        self, driver: RedisDriver, subject: str, what: bytes, *arguments: bytes | int
    ) -> Steps[None]:
        """Run a refund, a grant or a reset."""
        call = self.call(REGIONAL_CHANGE, subject, what, *arguments)
        self.require_readable(subject, (yield from driver.running(call)))

    def refunding(
        self, driver: RedisDriver, subject: str, units: int, charged_ns: int | None
    ) -> Steps[None]:
        charged = b"" if charged_ns is None else max(charged_ns, 0) // NS_PER_US
        return self.changing(driver, subject, b"refund", units, charged)

    def granting(
        self, driver: RedisDriver, subject: str, units: int, ttl_ns: int | None
    ) -> Steps[None]:
        # Rounded up: a grant never ends before the promised time.
        ttl = b"" if ttl_ns is None else -(-ttl_ns // NS_PER_US)
        return self.changing(driver, subject, b"grant", units, ttl, UNITS_MAX)

    def resetting(self, driver: RedisDriver, subject: str) -> Steps[None]:
        return self.changing(driver, subject, b"reset", 0, b"")


class RedisGlobalCounter(GlobalCounter):
    """One global rule's limits on Redis."""

    __slots__ = ("_links", "_rule", "limits")

    def __init__(self, rule: _GlobalRule, links: Links) -> None:
        self.limits = rule.limits
        self._rule = rule
        self._links = links

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: the server decides."""

    def check(self, subject: str, cost: int) -> Ask:
        """Spend `cost` units if every limit has room for this region. One round trip."""
        return self._links.ask(self._rule.checking, subject, cost)

    def peek(self, subject: str, cost: int) -> Ask:
        """Return the answer of `check`, with the remaining quota as it is now."""
        return self._links.ask(self._rule.peeking, subject, cost)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> Ask:
        """Give units of this region back. The other regions learn it with the next report."""
        return self._links.ask(self._rule.refunding, subject, units, charged_ns)

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> Ask | None:
        """Add extra units in this region."""
        return self._links.ask(self._rule.granting, subject, units, ttl_ns) if units else None

    def reset(self, subject: str) -> Ask:
        """Forget the counts of the subject in this region."""
        return self._links.ask(self._rule.resetting, subject)


# ── The calls of a sync ────────────────────────────────────────────────────────────────────────


class RedisRegional:
    """The counts of one region in its Redis. See RegionalCounts for its methods."""

    def __init__(self, config: RedisConfig, clock: Clock, links: Links) -> None:
        self._config = config
        self._clock = clock
        self._by_server_clock = type(clock) is SystemClock
        self._keys = _Keys(config)
        self._links = links
        # The token that all groups have, of the lead that this object has taken last.
        self._fenced = 0
        self._sent_bytes = self._received_bytes = 0

    def _now(self) -> ScriptTime:
        """Return the time argument of a script: that of a test's clock."""
        if self._by_server_clock and switches.clock is None:
            return SERVER_TIME
        return max(self._clock.now_ns(), 0) // NS_PER_US

    def _rule_of(self, limits: Limits, rule: str, across: AcrossRegions) -> _GlobalRule:
        return _GlobalRule(tuple(limits), rule, across, self._keys, self._now)

    def global_counter(
        self, limits: Limits, rule: str, across: AcrossRegions
    ) -> RedisGlobalCounter:
        """Prepare a rule's limits."""
        found = self._rule_of(limits, rule, across)
        return RedisGlobalCounter(found, self._links)

    async def _all(self, calls: Sequence[ScriptCall]) -> list[list[Any]]:
        """Return the replies to all calls. Raises StoreError if one fails."""
        replies = await self._run(calls)
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
        return replies

    async def _run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        replies = await run_async(self._links.of_loop().running_all(calls))
        self._sent_bytes += sum(each.size() for each in calls)
        self._received_bytes += _size(replies)
        return replies

    def traffic(self) -> tuple[int, int]:
        """See RegionalCounts. Without the bytes of TCP, TLS and calls that are sent again."""
        return self._sent_bytes, self._received_bytes

    async def _answered(self, calls: Mapping[T, ScriptCall]) -> dict[T, list[Any]]:
        """Return the replies of the servers that answer. Raises StoreError if none does."""
        if not calls:
            return {}
        replies = await self._run(list(calls.values()))
        found = {
            each: reply
            for each, reply in zip(calls, replies, strict=True)
            if not isinstance(reply, StoreError)
        }
        if not found:
            raise replies[0]
        return found

    async def _of_groups(self, *arguments: bytes | int) -> list[list[Any]]:
        """Run the script of the groups for each of them."""
        return await self._all(
            [self._keys.call(REGIONAL_GROUP, group, (), *arguments) for group in range(GROUPS)]
        )

    # ── Shares and the leader ──────────────────────────────────────────────────────────────────

    async def shares(self) -> Shares | None:
        """See RegionalCounts. The lowest epoch, if a call that sets others is under way."""
        found = [_shares_of(reply) for reply in await self._of_groups(b"get")]
        known = [each for each in found if each is not None]
        return min(known, key=lambda each: each.epoch) if len(known) == GROUPS else None

    async def set_shares(self, shares: Shares, token: int) -> bool:
        """See RegionalCounts."""
        replies = await self._of_groups(b"set", token, _encode_shares(shares, token))
        return all(reply == [token] for reply in replies)

    async def lead(self, name: str, lasts_ns: int) -> tuple[str, int]:
        """See RegionalCounts. The first call of a leader writes its token to all groups."""
        leader, token = await self._lead(name, lasts_ns, 0)
        if leader == name and token != self._fenced:
            later = max(reply[0] for reply in await self._of_groups(b"fence", token))
            if later > token:  # the key of the leader was lost, and its tokens began again
                leader, token = await self._lead(name, lasts_ns, later + 1)
                await self._of_groups(b"fence", token)
            self._fenced = token
        return leader, token

    async def _lead(self, name: str, lasts_ns: int, token_min: int) -> tuple[str, int]:
        lasts_us = lasts_ns // NS_PER_US
        leader, token = await self._of_region(b"lead", name.encode(), lasts_us, token_min)
        return leader.decode("utf-8", "replace"), token

    async def step_down(self, name: str) -> None:
        """See RegionalCounts."""
        await self._of_region(b"leave", name.encode())

    async def note(self, name: str, text: str) -> None:
        """See RegionalCounts. At most 64 names, and texts of 64 KiB."""
        packed = text.encode()
        if len(packed) > NOTE_BYTES_MAX:
            raise ValueError(f"a note has at most {NOTE_BYTES_MAX} bytes, and this {len(packed)}")
        if not await self._of_region(b"note", name.encode(), packed, NOTES_MAX):
            raise StoreUnavailable(f"the region has {NOTES_MAX} notes already, which are the most")

    async def notes(self) -> dict[str, str]:
        """See RegionalCounts."""
        found = [each.decode("utf-8", "replace") for each in await self._of_region(b"notes")]
        return dict(zip(found[::2], found[1::2], strict=True))

    async def now_ns(self) -> int:
        """See RegionalCounts."""
        (now_us,) = await self._of_region(b"time")
        return int(now_us) * NS_PER_US

    async def _of_region(self, *arguments: bytes | int) -> list[Any]:
        keys = self._keys
        given = (self._now(), *arguments)
        (reply,) = await self._all([ScriptCall(REGIONAL_LEADER, keys.leader, given, (keys.notes,))])
        return reply

    # ── Reports ────────────────────────────────────────────────────────────────────────────────

    async def due(self, most: int, token: int) -> list[Report]:
        """See RegionalCounts. Two round trips: the subjects, and their reports.

        If very many are due, each group gives about its part, the longest due first.
        """
        some = min(most, max(2 * most // GROUPS, STATES_MAX))
        found = await self._answered(
            {
                group: self._keys.call(REGIONAL_REPORT, group, (), self._now(), token, some)
                for group in range(GROUPS)
            }
        )
        ready = sorted(
            (float(score), member, group)
            for group, reply in found.items()
            for member, score in zip(reply[::2], reply[1::2], strict=True)
        )[:most]
        batches = _batches((group, member) for _, member, group in ready)
        replies = await self._answered(
            {
                number: self._keys.call(REGIONAL_REPORT, group, members, self._now(), token)
                for number, (group, members) in enumerate(batches)
            }
        )
        reports: dict[bytes, Report] = {}
        for number, reply in replies.items():
            for member, numbers in zip(batches[number][1], reply, strict=True):
                if numbers:
                    reports[member] = _report_of(member, numbers)
        return [reports[member] for _, member, _ in ready if member in reports]

    async def learn(self, region: str, epoch: int, reports: Sequence[Report]) -> list[Learnt]:
        """See RegionalCounts. One round trip.

        A report whose state cannot be read, or whose server does not answer, is not accepted.
        """
        name, now = region.encode(), self._now()
        if not reports:
            await self._answered(
                {
                    address: self._keys.call(REGIONAL_LEARN, group, (), now, name, epoch)
                    for address, group in self._server_groups().items()
                }
            )
            return []
        batches = _batches((each.key.group, at) for at, each in enumerate(reports))
        calls = {}
        for number, (group, places) in enumerate(batches):
            members = [_member(reports[at].key) for at in places]
            encoded = [part for at in places for part in _encode_report(reports[at])]
            calls[number] = self._keys.call(
                REGIONAL_LEARN, group, members, now, name, epoch, *encoded
            )
        answers = [Learnt(False, 0)] * len(reports)
        for number, reply in (await self._answered(calls)).items():
            if not reply:
                raise StoreUnavailable(NO_SHARE)
            pairs = zip(reply[::2], reply[1::2], strict=True)
            for at, (accepted, excess) in zip(batches[number][1], pairs, strict=True):
                answers[at] = Learnt(accepted == 1, excess)
        return answers

    def _server_groups(self) -> dict[Address, int]:
        """Return one group of keys for each server. Raises NotSent while they are unknown."""
        servers = self._links.servers
        return {
            servers.address_of(servers.slot(due)): group
            for group, (due, *_) in enumerate(self._keys.groups)
        }

    async def accept(self, epoch: int, accepted: Sequence[Accepted], token: int) -> None:
        """See RegionalCounts. One round trip. A total whose call fails is due again."""
        batches = _batches((each.key.group, at) for at, each in enumerate(accepted))
        calls = {}
        for number, (group, places) in enumerate(batches):
            members = [_member(accepted[at].key) for at in places]
            encoded = [_encode_accepted(accepted[at]) for at in places]
            calls[number] = self._keys.call(
                REGIONAL_ACCEPT, group, members, self._now(), epoch, token, *encoded
            )
        await self._answered(calls)

    async def usage(self, limits: Limits, rule: str, subject: str) -> RegionalUsage:
        """See RegionalCounts."""
        found = self._rule_of(limits, rule, "eventual")
        (reply,) = await self._all([found.call(REGIONAL_USAGE, subject)])
        found.require_readable(subject, reply)
        now_us, part, seen, *levels = reply
        parts = [RegionPart("", part, 0)]
        for region, units, at_us in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
            age_ns = max(now_us - at_us, 0) * NS_PER_US
            parts.append(RegionPart(region.decode("utf-8", "replace"), units, age_ns))
        pairs = list(zip(levels[::2], levels[1::2], strict=True))
        return RegionalUsage(
            tuple(-(-(known + own) // MICROS_PER_UNIT) for known, own in pairs),
            tuple(-(-own // MICROS_PER_UNIT) for _, own in pairs),
            tuple(parts),
        )

    async def backlog(self) -> int:
        """See RegionalCounts."""
        return sum(reply[0] for reply in await self._of_groups(b"count"))


def _size(reply: object) -> int:
    """Return about how many bytes a reply has on the wire."""
    if isinstance(reply, list):
        return 6 + sum(map(_size, reply))
    if isinstance(reply, bytes):
        return 8 + len(reply)
    return 3 + len(str(reply))


def _batches(items: Iterable[tuple[int, T]]) -> list[tuple[int, list[T]]]:
    """Return the items of each group, in batches of STATES_MAX."""
    groups: dict[int, list[T]] = {}
    for group, item in items:
        groups.setdefault(group, []).append(item)
    return [
        (group, found[start : start + STATES_MAX])
        for group, found in groups.items()
        for start in range(0, len(found), STATES_MAX)
    ]


def _encode_report(report: Report) -> tuple[bytes, bytes]:
    """Return the gate and the numbers of a report."""
    numbers = [report.generation, report.total, min(report.demand, _DEMAND_MAX), report.part]
    numbers.append(report.at_ns // NS_PER_US)
    for returned, counts in zip(report.returned, report.counts, strict=True):
        numbers += [returned, counts]
    return encode_gate(report.limits, report.across), encode_numbers(_cut(numbers))


def _encode_accepted(accepted: Accepted) -> bytes:
    _, generation, total, returned, everywhere = accepted
    return encode_numbers(_cut([generation, total, int(everywhere), *returned]))


def _cut(numbers: Sequence[int]) -> list[int]:
    """Return numbers that the scripts can count exactly."""
    return [min(max(each, 0), _NUMBER_MAX) for each in numbers]


def _report_of(member: bytes, numbers: Sequence[Any]) -> Report:
    gate, generation, total, demand, part, now_us, *levels = numbers
    limits, across = decode_gate(tuple(gate))
    return Report(
        _key_of(member),
        limits,
        across,
        generation,
        total,
        tuple(levels[::2]),
        tuple(levels[1::2]),
        demand,
        part,
        now_us * NS_PER_US,
    )


def _encode_shares(shares: Shares, token: int) -> bytes:
    for share in (shares.share, shares.before):
        if not 0 <= share <= 1 or share.denominator > SHARE_PARTS_MAX:
            raise ConfigError(
                f"the share {share} is not a fraction from 0 to 1 with a denominator of at most "
                f"{SHARE_PARTS_MAX:,}; for example 1/5"
            )
    changed_us = -(-max(shares.changed_ns, 0) // NS_PER_US)
    share, before = shares.share, shares.before
    numbers = [(LAYOUT, 1), (shares.epoch, 7), (share.numerator, 3), (share.denominator, 3)]
    numbers += [(token, 7), (before.numerator, 3), (before.denominator, 3), (changed_us, 7)]
    packed = b"".join(number.to_bytes(size) for number, size in numbers)
    return packed + "".join(f" {name} " for name in shares.live).encode()


def _shares_of(reply: Sequence[Any]) -> Shares | None:
    """Return the shares of a group; None if it has only a token."""
    if len(reply) == 1:
        return None
    epoch, numerator, denominator, _, lowest, parts, changed_us, *live = reply
    return Shares(
        epoch,
        Fraction(numerator, denominator),
        Fraction(lowest, parts),
        changed_us * NS_PER_US,
        tuple(each.decode("utf-8", "replace") for each in live),
    )
