"""Queries of the records: usage by time, and single decisions, in pages.

A page takes a few short transactions, however long the whole list is, so writers never wait for a
reader, and a slow client holds no connection. The next page begins after the last row of the
previous one, which the cursor names, so new rows shift nothing.

Adding up a whole month for each of its pages would take time that grows with the list. So usage is
queried in windows of time: one step, then the next two, four and so on, until the page is full.

Sums over a whole period (`most`, `groups`, `timeline`) read all its rows, which the bound of the
tables limits, and return few.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

from sqlalchemy import text

from ratekeeper.core.subjects import beyond
from ratekeeper.history.events import (
    ENDPOINT_LENGTH_MAX,
    OTHERS,
    PART,
    REQUEST_ID_LENGTH_MAX,
    SUBJECT_LENGTH_MAX,
    DecisionEvent,
    SubjectMode,
    cleaned,
    queried_subject,
    queried_value,
    recorded_subject,
    recorded_value,
    scope_parts,
)

if TYPE_CHECKING:
    from ratekeeper.control.database import Database

UsageStep = Literal["minute", "hour", "day"]
Outcome = Literal["allowed", "denied", "shadow_denied", "excess"]
UsageCount = Literal["requests", "checks", "allowed", "denied", "shadow_denied", "excess"]
GroupBy = Literal["rule", "subject", "tenant", "user", "endpoint"]
_Row = TypeVar("_Row")

STEP_SECONDS: Final[Mapping[UsageStep, int]] = {"minute": 60, "hour": 3_600, "day": 86_400}
# A whole list is queried in pages and returned in smaller pieces, so that other requests run
# in between.
PAGE_ROWS: Final = 5_000
PIECE_ROWS: Final = 500
# A page of sums reads the whole period, so a whole list of them is queried in larger pages.
SUMS_PAGE_ROWS: Final = 50_000

# Usage by steps of time; rows that exist only by the hour are returned by the hour.
_USAGE: Final = """
SELECT * FROM (
    SELECT start_s / :step * :step AS start_s,
           CASE WHEN step_s > :step THEN step_s ELSE :step END AS step_s,
           subject, rule, region,
           sum(allowed) AS allowed, sum(denied) AS denied, sum(units) AS units,
           sum(shadow_denied) AS shadow_denied, sum(denied_indirectly) AS denied_indirectly
    FROM ratekeeper_usage WHERE {where}
    GROUP BY 1, 2, subject, rule, region {having}
) AS found {after} ORDER BY start_s, subject, rule, step_s, region LIMIT :limit
"""
_AFTER: Final = (
    "WHERE (start_s, subject, rule, step_s, region) > "
    "(:start_s, :after_subject, :after_rule, :after_step, :after_region)"
)
# The counts of usage that an outcome selects.
_COUNT_OF: Final[Mapping[UsageCount, str]] = {
    "requests": "allowed + denied + shadow_denied + denied_indirectly",
    "checks": "allowed + denied",
    "allowed": "allowed",
    "denied": "denied + denied_indirectly",
    "shadow_denied": "shadow_denied",
    "excess": "0",  # it is no usage
}
_MOST: Final = """
SELECT * FROM (
    SELECT subject, rule, sum({count}) AS most,
           sum(allowed) AS allowed, sum(denied) AS denied, sum(units) AS units,
           sum(shadow_denied) AS shadow_denied, sum(denied_indirectly) AS denied_indirectly
    FROM ratekeeper_usage WHERE {where} GROUP BY subject, rule HAVING sum({count}) > 0
) AS found {after} ORDER BY most DESC, subject, rule LIMIT :limit
"""
_AFTER_MOST: Final = """
WHERE most < :after_most
   OR (most = :after_most AND (subject, rule) > (:after_subject, :after_rule))
"""
_GROUPS: Final = """
SELECT * FROM (
    SELECT name, requests, last_us, sum(requests) OVER () AS total, count(*) OVER () AS names
    FROM (
        SELECT {name} AS name, count(*) AS requests, max(at_us) AS last_us
        FROM {rows} WHERE {where} GROUP BY 1
    ) AS grouped
) AS found {after} ORDER BY requests DESC, name LIMIT :limit
"""
_AFTER_GROUP: Final = """
WHERE requests < :after_requests OR (requests = :after_requests AND name > :after_name)
"""
_TIMELINE: Final = """
SELECT at_us / :step * :step AS start_us, count(*) FROM ratekeeper_decisions WHERE {where}
GROUP BY 1 ORDER BY 1
"""
_DECISIONS: Final = "SELECT id, {columns} FROM ratekeeper_decisions {where} {order} LIMIT :limit"

# The columns of a decision's identity, by the field of the request.
_COLUMNS: Final = {"user": "user_id", "tenant": "tenant", "api_key": "api_key", "ip": "ip"}
# Distinct subjects, one look into the index for each: usage has many rows of a subject.
_NEXT_SUBJECT: Final = (
    "(SELECT subject FROM ratekeeper_usage WHERE {subject} {start} {end} "
    "ORDER BY {subject} LIMIT 1)"
)
_SUBJECTS: Final = """
WITH RECURSIVE found (subject, number) AS (
    SELECT {first}, 1
    UNION ALL
    SELECT {next}, number + 1 FROM found WHERE found.subject IS NOT NULL AND number < :limit
)
SELECT subject FROM found WHERE subject IS NOT NULL
"""


class UsageRow(NamedTuple):
    """The usage of a subject under a rule in one step of time."""

    start_s: int
    step_s: int
    subject: str
    rule: str
    allowed: int
    denied: int
    units: int
    shadow_denied: int = 0
    denied_indirectly: int = 0
    region: str = ""


class MostRow(NamedTuple):
    """The usage of a subject under a rule in a period. `most` is the count that sorts the rows."""

    subject: str
    rule: str
    most: int
    allowed: int
    denied: int
    units: int
    shadow_denied: int
    denied_indirectly: int


class GroupRow(NamedTuple):
    """The decisions that have one rule, subject, tenant, user or endpoint."""

    name: str
    requests: int
    last_us: int
    total: int
    """The decisions of all groups, on all pages."""
    names: int
    """The number of groups, on all pages."""


class DecisionRow(NamedTuple):
    """One decision of the log."""

    id: int
    event: DecisionEvent
    shadow_denied: list[str]
    rules: dict[str, str]

    @property
    def cursor(self) -> DecisionCursor:
        """Where the next page begins, if this is the last row of a page."""
        return DecisionCursor(self.event.at_us, self.id)


class RecordedRequest(NamedTuple):
    """As much of a decision as a replay needs; the fields are columns."""

    at_us: int
    id: int
    subject: str
    endpoint: str
    method: str
    outcome: str
    cost: int
    shadow_denied: str
    user_id: str
    tenant: str
    api_key: str
    ip: str
    request_id: str
    rules: str


# A RecordedRequest as a plain tuple. The garbage collector ceases to traverse a plain tuple of
# texts and numbers, but not a named one: 20,000 of those would make a worker pause for 20 ms.
RequestFields = tuple[int, int, str, str, str, str, int, str, str, str, str, str, str, str]
_REQUESTS: Final = """
SELECT {columns} FROM ratekeeper_decisions
WHERE at_us >= $1 AND (at_us, id) < ($2, $3) ORDER BY at_us DESC, id DESC LIMIT $4
"""


class DecisionCursor(NamedTuple):
    """The time and the id of the decision that a page begins after."""

    at_us: int
    id: int


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """The records to return. Times are since the epoch: from `from_us`, before `to_us`."""

    from_us: int
    to_us: int
    subject: str | None = None
    rule: str | None = None
    """The rule that decided; with the outcome `shadow_denied`, the rule in shadow mode."""
    outcome: Outcome | None = None
    region: str | None = None
    user: str | None = None
    """Of decisions: the user, the tenant, the endpoint and the ID of the request."""
    tenant: str | None = None
    endpoint: str | None = None
    request_id: str | None = None
    scope: Mapping[str, str] = field(default_factory=dict)
    """Only subjects with all these parts, and decisions on their requests: a token's scope."""


async def all_pages(
    page_of: Callable[[_Row | None], Awaitable[list[_Row]]], rows: int
) -> AsyncIterator[list[_Row]]:
    """Yield a whole list in pieces. `page_of` returns the `rows` rows after a row."""
    last: _Row | None = None
    while page := await page_of(last):
        for start in range(0, len(page), PIECE_ROWS):
            yield page[start : start + PIECE_ROWS]
        if len(page) < rows:
            return
        last = page[-1]


class Records:
    """Queries the records of one database. For one event loop."""

    def __init__(self, database: Database, subjects: SubjectMode = "plain") -> None:
        """`subjects` is the mode in which they were recorded."""
        self._database = database
        self._subjects: SubjectMode = subjects

    async def close(self) -> None:
        """Close every connection; the next query opens one."""
        await self._database.close()

    async def usage(
        self, wanted: RecordFilter, step: UsageStep, limit: int, after: UsageRow | None = None
    ) -> list[UsageRow]:
        """Return one page of usage, by time, then by subject and rule. Raises StoreError."""
        step_s = STEP_SECONDS[step]
        # The first and the last step may be partial.
        from_s = max(-(-wanted.from_us // 10**6), 0 if after is None else after.start_s, 0)
        to_s = -(-wanted.to_us // 10**6)
        found: list[UsageRow] = []
        window_s = step_s
        while from_s < to_s and len(found) < limit:
            until_s = min(from_s // step_s * step_s + window_s, to_s)
            left = limit - len(found)
            found += await self._usage(wanted, step_s, (from_s, until_s), left, after)
            # All rows of the next windows come after it.
            from_s, window_s, after = until_s, 2 * window_s, None
        return found

    async def _usage(
        self,
        wanted: RecordFilter,
        step_s: int,
        between: tuple[int, int],
        limit: int,
        after: UsageRow | None,
    ) -> list[UsageRow]:
        """Return the usage of a window of time, after a row."""
        from_s, to_s = between
        conditions = ["start_s >= :from_s", "start_s < :to_s"]
        given: dict[str, Any] = {"step": step_s, "from_s": from_s, "to_s": to_s, "limit": limit}
        self._narrow(wanted, conditions, given)
        count = None if wanted.outcome is None else _COUNT_OF[wanted.outcome]
        if after is not None:
            conditions.append("(start_s / :step * :step > :start_s OR subject >= :after_subject)")
            given |= {
                "start_s": after.start_s,
                "after_subject": after.subject,
                "after_rule": after.rule,
                "after_step": after.step_s,
                "after_region": after.region,
            }
        statement = _USAGE.format(
            where=" AND ".join(conditions),
            after="" if after is None else _AFTER,
            having="" if count is None else f"HAVING sum({count}) > 0",
        )
        rows = await self._rows(statement, given)
        return [
            UsageRow._make([*row[:4], *map(int, row[5:]), row[4]])  # the region comes last
            for row in rows
        ]

    def all_usage(self, wanted: RecordFilter, step: UsageStep) -> AsyncIterator[list[UsageRow]]:
        """Yield all usage, in pieces. Raises StoreError."""
        return all_pages(lambda last: self.usage(wanted, step, PAGE_ROWS, last), PAGE_ROWS)

    def all_decisions(self, wanted: RecordFilter) -> AsyncIterator[list[DecisionRow]]:
        """Yield all decisions, in pieces, the newest first. Raises StoreError."""
        return all_pages(
            lambda last: self.decisions(wanted, PAGE_ROWS, None if last is None else last.cursor),
            PAGE_ROWS,
        )

    async def decisions(
        self, wanted: RecordFilter, limit: int, before: DecisionCursor | None = None
    ) -> list[DecisionRow]:
        """Return one page of decisions before `before`, the newest first. Raises StoreError."""
        conditions, given = self._of_decisions(wanted, limit=limit)
        if before is not None:
            conditions.append("(at_us, id) < (:before_us, :before_id)")
            given |= {"before_us": before.at_us, "before_id": before.id}
        statement = _DECISIONS.format(
            columns=", ".join(DecisionEvent._fields),
            where="WHERE " + " AND ".join(conditions),
            order="ORDER BY at_us DESC, id DESC",
        )
        return [
            DecisionRow(row[0], event, json.loads(event.shadow_denied), json.loads(event.rules))
            for row in await self._rows(statement, given)
            for event in [DecisionEvent(*row[1:])]
        ]

    async def requests(
        self, from_us: int, before: DecisionCursor, limit: int
    ) -> list[RequestFields]:
        """Return requests since a time and before a decision, the newest first.

        Raises StoreError.
        """
        statement = _REQUESTS.format(columns=", ".join(RecordedRequest._fields))
        return await self._database.rows(statement, from_us, before.at_us, before.id, limit)

    async def groups(
        self, wanted: RecordFilter, by: GroupBy, limit: int, after: GroupRow | None = None
    ) -> list[GroupRow]:
        """Return one page of the decisions in groups, the largest first. Raises StoreError.

        `by="rule"` with the outcome `shadow_denied` groups by the rules in shadow mode.
        """
        conditions, given = self._of_decisions(wanted, limit=limit)
        name, rows = _COLUMNS.get(by, by), "ratekeeper_decisions"
        if by == "rule" and wanted.outcome == "shadow_denied":
            name = "each_rule.value"
            rows += (
                ", jsonb_array_elements_text(shadow_denied::jsonb) AS each_rule(value)"
                if self._database.is_postgresql
                else ", json_each(shadow_denied) AS each_rule"
            )
            if wanted.rule is not None:
                conditions.append("each_rule.value = :shadow_rule")
                given["shadow_rule"] = cleaned(wanted.rule, SUBJECT_LENGTH_MAX)
        if after is not None:
            given |= {"after_requests": after.requests, "after_name": after.name}
        statement = _GROUPS.format(
            name=name,
            rows=rows,
            where=" AND ".join(conditions),
            after="" if after is None else _AFTER_GROUP,
        )
        return [
            GroupRow(name, *map(int, counts))
            for name, *counts in await self._rows(statement, given)
        ]

    def all_groups(self, wanted: RecordFilter, by: GroupBy) -> AsyncIterator[list[GroupRow]]:
        """Yield all groups, in pieces. Raises StoreError."""
        return all_pages(lambda last: self.groups(wanted, by, SUMS_PAGE_ROWS, last), SUMS_PAGE_ROWS)

    async def timeline(self, wanted: RecordFilter, step_s: int) -> list[tuple[int, int]]:
        """Return the time and the number of the decisions of each step that has some.

        Times are in microseconds, and multiples of the step. Raises StoreError.
        """
        conditions, given = self._of_decisions(wanted, step=step_s * 10**6)
        statement = _TIMELINE.format(where=" AND ".join(conditions))
        return [(int(at_us), int(count)) for at_us, count in await self._rows(statement, given)]

    async def most(
        self,
        wanted: RecordFilter,
        by: UsageCount,
        limit: int,
        after: MostRow | None = None,
        *,
        others: bool = True,
    ) -> list[MostRow]:
        """Return the usage of the period by subject and rule, the largest count first.

        `others`: also the requests that are counted without their subject, as OTHERS.
        It reads all usage of the period, which is bounded like the table. Raises StoreError.
        """
        conditions = ["start_s >= :from_s", "start_s < :to_s"]
        given: dict[str, Any] = {
            "from_s": -(-wanted.from_us // 10**6),
            "to_s": -(-wanted.to_us // 10**6),
            "limit": limit,
        }
        self._narrow(wanted, conditions, given)
        if not others:
            conditions.append("subject <> :others")
            given["others"] = OTHERS
        if after is not None:
            given |= {
                "after_most": after.most,
                "after_subject": after.subject,
                "after_rule": after.rule,
            }
        statement = _MOST.format(
            count=_COUNT_OF[by],
            where=" AND ".join(conditions),
            after="" if after is None else _AFTER_MOST,
        )
        rows = await self._rows(statement, given)
        return [MostRow(subject, rule, *map(int, counts)) for subject, rule, *counts in rows]

    def all_most(self, wanted: RecordFilter, by: UsageCount) -> AsyncIterator[list[MostRow]]:
        """Yield the usage of the period by subject and rule, in pieces. Raises StoreError."""
        return all_pages(lambda last: self.most(wanted, by, SUMS_PAGE_ROWS, last), SUMS_PAGE_ROWS)

    def _of_decisions(self, wanted: RecordFilter, **given: Any) -> tuple[list[str], dict[str, Any]]:
        """Return the conditions of decisions, and the values that they need besides `given`."""
        conditions = ["at_us >= :from_us", "at_us < :to_us"]
        given |= {"from_us": wanted.from_us, "to_us": wanted.to_us}
        self._narrow(wanted, conditions, given, of_decisions=True)
        self._narrow_decisions(wanted, conditions, given)
        return conditions, given

    async def subjects(self, begin: str, after: str, limit: int) -> list[str]:
        """Return the subjects with recorded usage that begin with a text, in order, after one.

        It reads one row for each. If subjects are recorded as digests, only `begin` itself can be
        found. Raises StoreError.
        """
        if self._subjects != "plain":
            wanted = recorded_subject(begin, self._subjects)
            query = "SELECT 1 FROM ratekeeper_usage WHERE subject = :subject LIMIT 1"
            known = wanted and begin > after and await self._rows(query, {"subject": wanted})
            return [begin] if known else []
        collation = ' COLLATE "C"' if self._database.is_postgresql else ""
        subject = f"ratekeeper_usage.subject{collation}"
        given: dict[str, Any] = {"start": max(begin, after), "limit": limit}
        end = ""
        if (last := beyond(begin)) is not None:
            end = f"AND {subject} < :end"
            given["end"] = last
        # One bound: of two, SQLite would search the index for either, and read on from there.
        start = "> :start" if after >= begin else ">= :start"
        query = _SUBJECTS.format(
            first=_NEXT_SUBJECT.format(subject=subject, start=start, end=end),
            next=_NEXT_SUBJECT.format(subject=subject, start="> found.subject", end=end),
        )
        return [row[0] for row in await self._rows(query, given)]

    def _narrow(
        self,
        wanted: RecordFilter,
        conditions: list[str],
        given: dict[str, Any],
        *,
        of_decisions: bool = False,
    ) -> None:
        if wanted.subject is not None:
            conditions.append("subject = :subject")
            given["subject"] = queried_subject(wanted.subject, self._subjects)
        if wanted.region is not None:
            conditions.append("region = :region")
            given["region"] = wanted.region
        if wanted.rule is not None:
            given["rule"] = cleaned(wanted.rule, SUBJECT_LENGTH_MAX)
            if not of_decisions or wanted.outcome != "shadow_denied":
                conditions.append("rule = :rule")
        find = "strpos" if self._database.is_postgresql else "instr"
        parts = scope_parts(wanted.scope, self._subjects)
        for number, (name, part) in enumerate(zip(wanted.scope, parts, strict=True)):
            # Whole parts at any position: "tenant:acme" does not match "tenant:acme-2".
            of_scope = f"{find}(:sep || subject || :sep, :scope_{number}) > 0"
            given["sep"] = PART
            given[f"scope_{number}"] = f"{PART}{part}{PART}"
            value = self._identity(name, wanted.scope[name]) if of_decisions else ""
            if value:
                of_scope = f"({of_scope} OR {_COLUMNS[name]} = :value_{number})"
                given[f"value_{number}"] = value
            conditions.append(of_scope)

    def _narrow_decisions(
        self, wanted: RecordFilter, conditions: list[str], given: dict[str, Any]
    ) -> None:
        """Add the conditions that only decisions have; each but the endpoint has an index."""
        if wanted.outcome == "shadow_denied":
            conditions.append("shadow_denied <> '[]'")
            if wanted.rule is not None:
                find = "strpos" if self._database.is_postgresql else "instr"
                conditions.append(f"{find}(shadow_denied, :shadow) > 0")
                given["shadow"] = json.dumps(given.pop("rule"))
        elif wanted.outcome is not None:
            conditions.append("outcome = :outcome")
            given["outcome"] = wanted.outcome
        for name, value in (("user", wanted.user), ("tenant", wanted.tenant)):
            if value is not None:
                # The indexes have no empty values.
                conditions += [f"{_COLUMNS[name]} = :{name}", f"{_COLUMNS[name]} <> ''"]
                given[name] = queried_value(value, self._subjects)
        if wanted.endpoint is not None:
            conditions.append("endpoint = :endpoint")
            given["endpoint"] = cleaned(wanted.endpoint, ENDPOINT_LENGTH_MAX)
        if wanted.request_id is not None:
            conditions += ["request_id = :request_id", "request_id <> ''"]
            given["request_id"] = cleaned(wanted.request_id, REQUEST_ID_LENGTH_MAX)

    def _identity(self, name: str, value: str) -> str:
        """Return a field of the identity as it was recorded; "" if it is not recorded."""
        if name not in _COLUMNS or self._subjects == "none":
            return ""
        return recorded_value(value, "hashed" if name == "api_key" else self._subjects)

    async def _rows(self, statement: str, given: Mapping[str, Any]) -> list[Any]:
        async with self._database.reading() as connection:
            found = await connection.execute(text(statement), dict(given))
            return list(found.all())
