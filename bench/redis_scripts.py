"""The server's time of a check, beside the plainest token bucket in Lua.

A round runs each script 100 times and takes the mean time of EVALSHA from `INFO commandstats`. The
rounds of all scripts alternate, and a row shows the median. The goals are at most 1.2 plain buckets
for a check alone, 1.3 plain batches for a batch, and 1.4 checks for two rules of one request, for a
refund and for a late charge.

The plain scripts keep two numbers in a hash of their own for each subject. They know one limit,
deny without a reason and cannot change a limit.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import time_ns
from typing import Final

import hiredis
from tests.redis_servers import Single

from bench.measure import SEED
from bench.redis_measure import RedisEffort
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.model import AlgorithmName, Limit
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.scripts import (
    OWE,
    REFUND,
    SERVER_TIME,
    RuleScripts,
    ScriptCharge,
    batch_call,
    pack,
)

_CALLS: Final = 100
_BATCH: Final = 16
_SUBJECTS: Final = 1_000
_WARM_ROUNDS: Final = 30
SCRIPTS_HEADING: Final = "\nredis, the server's time of a call in microseconds, and its quotient"
_REPLY_BYTES: Final = 1 << 16
_PLAIN: Final = b"""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local answers = {}
for i, key in ipairs(KEYS) do
    local state = redis.call('HMGET', key, 'used', 'at')
    local used, at = tonumber(state[1]) or 0, tonumber(state[2]) or now
    used = math.max(0, used - math.max(0, now - at) * 0.0003)
    local allowed = used + 1 <= 1000000
    if allowed then
        redis.call('HSET', key, 'used', used + 1, 'at', now)
        redis.call('EXPIRE', key, 3600)
    end
    answers[i] = allowed and 1 or 0
end
return answers
"""


@dataclass(frozen=True, slots=True)
class ScriptTime:
    """The server's median time of a call, and its quotient by that of another row."""

    work: str
    microseconds: float
    times: float
    of: str


def measure_scripts(effort: RedisEffort) -> Iterator[ScriptTime]:
    """Measure every script beside the one that it is compared with."""
    with Single() as server, socket.create_connection(server.address) as connection:
        works = _works(server)
        rounds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(_WARM_ROUNDS):  # until the subjects have states
            for payload in works.values():
                _round(server, connection, payload)
        for _ in range(effort.packed_rounds):
            for name, payload in works.items():
                rounds[name].append(_round(server, connection, payload))
        medians = {name: median(times) for name, times in rounds.items()}
        for name, of in (
            ("plain bucket", "plain bucket"),
            ("check", "plain bucket"),
            ("check of a log", "plain bucket"),
            ("plain batch of 16", "plain batch of 16"),
            ("batch of 16 checks", "plain batch of 16"),
            ("two rules", "check"),
            ("refund", "check"),
            ("late charge", "check"),
        ):
            yield ScriptTime(name, medians[name], medians[name] / medians[of], of)


def _works(server: Single) -> dict[str, Callable[[], bytes]]:
    rng = random.Random(SEED)
    plain = server.admin.script_load(_PLAIN).encode()

    def subject() -> str:
        return f"user:{rng.randrange(_SUBJECTS)}"

    def plain_call(keys: int) -> bytes:
        return pack("EVALSHA", plain, keys, *(f"plain:{subject()}" for _ in range(keys)))

    def rule(name: str, algorithm: AlgorithmName = "token_bucket") -> RuleScripts:
        limits = (Limit(1_000_000, per=3_600, algorithm=algorithm),)
        return RuleScripts(limits, name, parse(server.uri), SystemClock())

    one, other, log = rule("one"), rule("other"), rule("log", "sliding_window_log")

    for script in (one.script, log.script, REFUND, OWE):
        server.admin.script_load(script.text)

    def ours(groups: Sequence[Sequence[ScriptCharge]]) -> bytes:
        return batch_call(groups, SERVER_TIME, spend=True).by_sha()

    def two_rules() -> bytes:
        same = subject()
        return ours([[ScriptCharge(one, same, 1), ScriptCharge(other, same, 1)]])

    def refund() -> bytes:
        return one.refund(subject(), 1, time_ns()).by_sha()

    return {
        "plain bucket": lambda: plain_call(1),
        "check": lambda: ours([[ScriptCharge(one, subject(), 1)]]),
        "check of a log": lambda: ours([[ScriptCharge(log, subject(), 1)]]),
        "two rules": two_rules,
        "refund": refund,
        "late charge": lambda: one.owe(subject(), 1).by_sha(),
        "plain batch of 16": lambda: plain_call(_BATCH),
        "batch of 16 checks": lambda: ours(
            [[ScriptCharge(one, subject(), 1)] for _ in range(_BATCH)]
        ),
    }


def _round(server: Single, connection: socket.socket, payload: Callable[[], bytes]) -> float:
    """Send these calls at once, and return the server's microseconds per call."""
    payloads = [payload() for _ in range(_CALLS)]
    server.admin.config_resetstat()
    connection.sendall(b"".join(payloads))
    reader, missing = hiredis.Reader(), len(payloads)
    while missing:
        reader.feed(connection.recv(_REPLY_BYTES))
        while (reply := reader.gets()) is not False:
            if type(reply) is not list:
                raise RuntimeError(f"a script failed: {reply!r}")
            missing -= 1
    return float(server.admin.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def scripts_line(row: ScriptTime) -> str:
    """Return the line of one row."""
    return f"{row.work:20}  {row.microseconds:6.2f}  {row.times:5.2f} x {row.of}"
