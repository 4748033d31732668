"""What is old leaves the tables, in small steps, so that nobody waits for it.

- Minutes of usage become hours when they are a day old: sums stay, and a sixtieth of the rows.
- Usage is kept for so many days, and decisions for fewer.

Every worker of every node would do this. One does: whoever first sets the time at which the tables
were last tended. It is done anew every TEND_SECONDS, and each step is a transaction of its own.

While it is done, its worker writes nothing. So it stops after STEPS_MAX steps of each kind, some
hundred milliseconds, and goes on after the next batch: thousands of rows a second, more than a
worker ever writes. Where even that is not enough, another one comes to help a minute later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from tollkeeper.history import tables

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

TEND_SECONDS: Final = 60
STEP_ROWS: Final = 2_000
STEPS_MAX: Final = 5
MINUTES_KEPT_SECONDS: Final = 86_400
HOUR_SECONDS: Final = 3_600
DAY_SECONDS: Final = 86_400
# A writer that has written nothing for so long writes no batch a second time.
WRITER_SECONDS: Final = 7 * DAY_SECONDS

# PostgreSQL: what is removed is what is added, in one statement, whoever else adds to it meanwhile.
_ROLL_UP: Final = """
WITH gone AS (
    DELETE FROM tollkeeper_usage WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM tollkeeper_usage WHERE step_s = 60 AND start_s < :before
        ORDER BY start_s LIMIT :most FOR UPDATE SKIP LOCKED))
    RETURNING subject, rule, start_s, allowed, denied, units
), hours AS (
    SELECT subject, rule, start_s / 3600 * 3600 AS hour_s, sum(allowed)::bigint AS allowed,
           sum(denied)::bigint AS denied, sum(units) AS units
    FROM gone GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
), added AS (
    INSERT INTO tollkeeper_usage AS kept
        (subject, rule, step_s, start_s, allowed, denied, units)
    SELECT subject, rule, 3600, hour_s, allowed, denied, units FROM hours
    ON CONFLICT (subject, rule, start_s, step_s) DO UPDATE SET
        allowed = kept.allowed + excluded.allowed,
        denied = kept.denied + excluded.denied,
        units = kept.units + excluded.units
)
SELECT count(*) FROM gone
"""
# SQLite has one writer at a time, so the same rows are found twice.
_OLD_MINUTES: Final = (
    "SELECT rowid FROM tollkeeper_usage WHERE step_s = 60 AND start_s < :before "
    "ORDER BY start_s, rowid LIMIT :most"
)
_ADD_HOURS: Final = f"""
INSERT INTO tollkeeper_usage (subject, rule, step_s, start_s, allowed, denied, units)
SELECT subject, rule, 3600, start_s / 3600 * 3600 AS hour_s, sum(allowed), sum(denied), sum(units)
FROM tollkeeper_usage WHERE rowid IN ({_OLD_MINUTES}) GROUP BY subject, rule, hour_s
ON CONFLICT (subject, rule, start_s, step_s) DO UPDATE SET
    allowed = allowed + excluded.allowed,
    denied = denied + excluded.denied,
    units = units + excluded.units
"""  # noqa: S608 - a text of ours
_REMOVE_MINUTES: Final = f"""
DELETE FROM tollkeeper_usage WHERE rowid IN ({_OLD_MINUTES})
"""  # noqa: S608 - same
_REMOVE_USAGE: Final = (
    "DELETE FROM tollkeeper_usage WHERE {row} IN (SELECT {row} FROM tollkeeper_usage "
    "WHERE start_s < :before ORDER BY start_s LIMIT :most)"
)

Transaction = Callable[[], AbstractAsyncContextManager["AsyncConnection"]]


@dataclass(frozen=True, slots=True)
class Keep:
    """How long records are kept."""

    decisions_days: int = 7
    usage_days: int = 90


class Trimmer:
    """Tends the tables of one database."""

    def __init__(self, writing: Transaction, keep: Keep, *, is_postgresql: bool) -> None:
        """`writing` makes a transaction that may write."""
        self._writing = writing
        self._keep = keep
        self._is_postgresql = is_postgresql
        self.is_behind = False
        """Is there more to trim, at once?"""

    async def tend(self, now_s: int) -> bool:
        """Trim what is due, if it is our turn, or still is. Raises StoreError."""
        if not self.is_behind and not await self._is_our_turn(now_s):
            return False
        self.is_behind = False
        if self._is_postgresql:
            await self._days(now_s)
        else:
            before_us = (now_s - self._keep.decisions_days * DAY_SECONDS) * 1_000_000
            await self._in_steps(
                "DELETE FROM tollkeeper_decisions WHERE id IN (SELECT id FROM tollkeeper_decisions "
                "WHERE at_us < :before ORDER BY at_us LIMIT :most)",
                before_us,
            )
        await self._roll_up(now_s)
        await self._in_steps(
            _REMOVE_USAGE.format(row="ctid" if self._is_postgresql else "rowid"),
            now_s - self._keep.usage_days * DAY_SECONDS,
        )
        return True

    async def _is_our_turn(self, now_s: int) -> bool:
        async with self._writing() as connection:
            found = await connection.execute(
                text(
                    "UPDATE tollkeeper_record_state SET tended_s = :now "
                    "WHERE tended_s <= :due OR tended_s > :wrong"
                ),
                # A time that is far ahead was set by a clock that is wrong.
                {"now": now_s, "due": now_s - TEND_SECONDS, "wrong": now_s + TEND_SECONDS},
            )
            if not found.rowcount:
                return False
            await connection.execute(
                text("DELETE FROM tollkeeper_record_writers WHERE at_s < :before"),
                {"before": now_s - WRITER_SECONDS},
            )
            return True

    async def _days(self, now_s: int) -> None:
        today = tables.day_of(now_s * 1_000_000)
        async with self._writing() as connection:
            await tables.make_days(connection, tables.days_ahead(now_s * 1_000_000))
        async with self._writing() as connection:
            oldest = today - timedelta(days=self._keep.decisions_days)
            await tables.drop_days(connection, oldest)

    async def _roll_up(self, now_s: int) -> None:
        # Whole hours: the last one stays in minutes until all of it is old enough.
        before = (now_s - MINUTES_KEPT_SECONDS) // HOUR_SECONDS * HOUR_SECONDS
        given: dict[str, Any] = {"before": before, "most": STEP_ROWS}
        for _ in range(STEPS_MAX):
            async with self._writing() as connection:
                if self._is_postgresql:
                    count = (await connection.execute(text(_ROLL_UP), given)).scalar_one()
                else:
                    await connection.execute(text(_ADD_HOURS), given)
                    count = (await connection.execute(text(_REMOVE_MINUTES), given)).rowcount
            if count < STEP_ROWS:
                return
        self.is_behind = True

    async def _in_steps(self, statement: str, before: int) -> None:
        for _ in range(STEPS_MAX):
            async with self._writing() as connection:
                done = await connection.execute(
                    text(statement), {"before": before, "most": STEP_ROWS}
                )
                count = done.rowcount
            if count < STEP_ROWS:
                return
        self.is_behind = True
