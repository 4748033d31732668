"""How the admin API reads and changes the rules, and reaches the limiter of this node.

Rules are read from the database where they are changed, so a caller can read its own change at
once; the limiter of this node gets it a moment later. If the rules come from a file, the file is
the only place to change them: they are read from the limiter, and every change is rejected.

The database is opened at the first request that needs it. A node whose database is unavailable
still answers everything else.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from fractions import Fraction
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from ratekeeper.control.edits import NotFound
from ratekeeper.control.entries import REMOVE_KINDS, EntryChange, EntryRows, check_signature
from ratekeeper.control.follow import announce
from ratekeeper.control.repository import Kind, Repository, Version
from ratekeeper.core.errors import (
    ChangeRefused,
    ConfigError,
    RatekeeperError,
    StoreError,
    VersionConflict,
    show,
)
from ratekeeper.core.model import REQUEST_FIELDS, Request, units_of
from ratekeeper.core.subjects import SEPARATOR
from ratekeeper.decide.store import shared_store
from ratekeeper.history.events import recorded_subject
from ratekeeper.history.recorder import Recorder
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.metrics.counters import MetricsSnapshot
from ratekeeper.rules.compiled import CompiledRules, RuleCheck
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.document.writing import to_yaml
from ratekeeper.rules.entries import Entry, EntryKind
from ratekeeper.service.http.activity import ActivityHistory
from ratekeeper.service.http.envoys import EnvoyDirectory
from ratekeeper.service.http.incoming import IncomingBodies
from ratekeeper.service.http.loads import SharedLoads
from ratekeeper.service.http.tokens import Token, Tokens
from ratekeeper.web.identity import Identity

# Each failed attempt means that another change succeeded; a rollback is urgent, so it is retried.
ROLLBACK_ATTEMPTS_MAX: Final = 20
# The rules of one subject whose quotas are shown or changed together.
SUBJECT_RULES_MAX: Final = 500

# Requests that do or await heavy work in a worker, and those of them with the same token.
HEAVY_MAX: Final = 8
HEAVY_OF_TOKEN_MAX: Final = 3
# Work on less than this takes milliseconds, and needs no turn.
HEAVY_LENGTH: Final = 32 * 1024
HEAVY_ENTRIES: Final = 500

_Result = TypeVar("_Result")

log = logging.getLogger("ratekeeper.admin")


class AdminContext(Protocol):
    """The parts of a worker that the admin API needs; ServiceContext has them."""

    limiter: AsyncLimiter
    tokens: Tokens
    node_id: str
    node_header: str
    started_ns: int
    database: str | None
    recorder: Recorder | None
    control: ControlPlane | None
    loads: SharedLoads
    envoys: EnvoyDirectory
    identity: Identity
    activity: ActivityHistory
    store_name: str
    bodies: IncomingBodies

    @property
    def totals(self) -> Callable[[], MetricsSnapshot]:
        """Return the counts of all workers of the node."""
        ...


class NoDatabase(ChangeRefused):
    """The rules come from a file and cannot be changed here."""

    def __init__(self, source: str) -> None:
        where = f" ({source})" if source else ""
        super().__init__(
            f"the rules of this node come from a file{where} and have no versions; change the "
            f"file, or start with `ratekeeper serve --rules sqlite:///rules.db`"
        )


class NoRegions(ChangeRefused):
    """The service has no regions whose shares could be changed."""

    def __init__(self) -> None:
        super().__init__(
            "this service has no regions; start it with --region and a table of regions"
        )


class UnusableRules(ChangeRefused):
    """The nodes of this service would refuse the document and keep the rules in force."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(f"this service cannot use the document, so nothing was changed: {error}")


class Busy(RatekeeperError):
    """This worker does work that takes long, and as much of it waits as may wait."""

    def __init__(self) -> None:
        super().__init__(
            "this worker is busy with other requests that take long; repeat this one after a second"
        )


class HeavyWork:
    """Lets one request at a time do work that can take a processor for seconds.

    Anyone with a token may ask for such work: a draft is parsed, a document is written or compared.
    It runs in a thread, which shares Python's lock with the checks of the worker, so several at a
    time would delay checks and need the memory of all. Further requests wait for their turn: some
    of each token, so that the requests of one do not displace those of another.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._asking: Counter[str] = Counter()

    def asked_by(self, name: str) -> int:
        """Return how many requests with the token of this name do such work or wait for it."""
        return self._asking[name]

    @asynccontextmanager
    async def turn(
        self, token: Token, over: str | bytes | Document | None = None
    ) -> AsyncIterator[None]:
        """Wait for the turn of a request with this token. Raises Busy.

        `over` is the text, form or document that is worked on; a short one needs no turn.
        """
        if over is not None and _is_short(over):
            yield
            return
        if self._asking[token.name] >= HEAVY_OF_TOKEN_MAX or self._asking.total() >= HEAVY_MAX:
            raise Busy
        self._asking[token.name] += 1
        try:
            async with self._turn:
                yield
        finally:
            self._asking[token.name] -= 1
            if not self._asking[token.name]:
                del self._asking[token.name]


def _is_short(over: str | bytes | Document) -> bool:
    if isinstance(over, str | bytes):
        return len(over) < HEAVY_LENGTH
    parts = (over.rules, over.assign, over.allow, over.deny, over.overrides)
    return sum(map(len, parts)) < HEAVY_ENTRIES


class CurrentRules(NamedTuple):
    """The newest rules."""

    document: Document
    etag: str
    """In quotes, as in HTTP: `"v12"`, or for a file the beginning of its hash."""
    number: int | None
    """The version number; 0: there is no version yet; None: the rules come from a file."""
    text: str | None = None
    """The stored text of the document; None if it has to be written from the document."""

    def yaml(self) -> str:
        """Return the document as YAML."""
        return to_yaml(self.document) if self.text is None else self.text


class VersionCondition(NamedTuple):
    """The version that a change expects."""

    numbers: frozenset[int] | None = None
    """One of these versions; empty: no version matches."""
    any_version: bool = False
    """Any version, but one must exist."""

    def expected(self, current: int) -> int | None:
        """Return the version to expect; None: any. Raises VersionConflict."""
        if self.any_version and current == 0:
            raise VersionConflict(1, 0)
        if self.any_version or self.numbers is None:
            return None
        if current not in self.numbers:
            raise VersionConflict(max(self.numbers, default=0), current)
        return current


class ChangeRequest(NamedTuple):
    """The author of a change, the reason, and the expected version."""

    author: str
    reason: str = ""
    force: bool = False
    condition: VersionCondition | None = None

    def because(self, reason: str | None) -> ChangeRequest:
        """Return the request with the reason from the body, if there is one."""
        return self._replace(reason=reason) if reason else self


def control_plane(context: AdminContext) -> ControlPlane:
    """Return the control plane of a worker, which all its endpoints share."""
    if context.control is None:
        context.control = ControlPlane(context)
    return context.control


def etag_of(number: int, change: int = 0) -> str:
    """Return the ETag of a version, or of the entries beside it after a change of them.

    >>> etag_of(12), etag_of(12, 57)
    ('"v12"', '"v12-57"')
    """
    return f'"v{number}-{change}"' if change else f'"v{number}"'


# The fields of a request that name a client, as the key of an audit entry has them.
_CLIENT: Final = ("tenant", "user", "api_key", "ip")


class Operation(NamedTuple):
    """An operation on the counts of a request's subjects."""

    kind: str
    request: Request
    data: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The key of the audit entry."""
        return " ".join(self.client)

    @property
    def client(self) -> list[str]:
        """The client that the request names, in parts: `user:42`."""
        given = ((name, getattr(self.request, name)) for name in _CLIENT)
        return [f"{name}:{value}" for name, value in given if value is not None]

    def text(self) -> str:
        """Return the data of the audit entry, as JSON: the request, and the operation."""
        fields = {name: getattr(self.request, name) for name in REQUEST_FIELDS}
        named = {name: value for name, value in fields.items() if value is not None}
        attributes = dict(self.request.attributes)
        request = {**named, **({"attributes": attributes} if attributes else {})}
        return json.dumps({"request": request, **self.data}, ensure_ascii=False)

    def failed(self, error: Exception) -> Operation:
        """Return the operation as one that the store did not make."""
        return self._replace(kind=f"{self.kind}-failed", data={**self.data, "error": str(error)})

    def logged(self, change: ChangeRequest) -> str:
        """Return the line of the log. It has the hash of the client: a key is a secret."""
        rules = ", ".join(self.data["subjects"]) or "none"
        client = " ".join(recorded_subject(part, "hashed") for part in self.client) or "none"
        reason = f"; reason: {show(change.reason)}" if change.reason else ""
        return f"quota {self.kind} by {change.author}; rules: {rules}; client: {client}{reason}"


class RuleSelection(NamedTuple):
    """The rules of a request whose quota is shown or changed."""

    every: bool = False
    """All rules that count the request's subject, whatever its other attributes are."""
    rule: str | None = None
    """Only this rule."""


class SharesChange(NamedTuple):
    """A change of the shares of regions."""

    kind: str
    key: str
    """The region that is added or removed; empty if all shares are set."""
    data: Mapping[str, Any]

    def text(self) -> str:
        """Return the data of the audit entry, as JSON."""
        return json.dumps(self.data, ensure_ascii=False)

    def failed(self, error: Exception) -> SharesChange:
        """Return the change as one that was not made."""
        return self._replace(kind=f"{self.kind}-failed", data={**self.data, "error": str(error)})

    def logged(self, change: ChangeRequest) -> str:
        """Return the line of the log."""
        reason = f"; reason: {show(change.reason)}" if change.reason else ""
        return f"{self.kind} {self.key} by {change.author}: {self.text()}{reason}"


_ALL: Final = RuleSelection()


class ControlPlane:
    """The rules in their database, and the limiter of this node. For one event loop."""

    def __init__(self, context: AdminContext) -> None:
        self.context = context
        self._repository: Repository | None = None
        self._opening = asyncio.Lock()
        self.importing = asyncio.Lock()
        """Held by the one import of entries that this worker makes at a time."""
        self.heavy = HeavyWork()
        self.previewing = asyncio.Lock()
        """Held by the one preview of a draft that this worker makes at a time."""

    def compiled_rules(self) -> CompiledRules:
        """Return the rules in force in this node."""
        return self.context.limiter.compiled_rules

    async def repository(self) -> Repository:
        """Return the database of the rules. Raises NoDatabase, StoreError."""
        url = self.context.database
        if url is None:
            raise NoDatabase(self.context.limiter.rules_status().source)
        async with self._opening:
            if self._repository is None:
                self._repository = await Repository.open(url)
            return self._repository

    async def close(self) -> None:
        """Close the database; the next request opens it again."""
        async with self._opening:
            repository, self._repository = self._repository, None
            if repository is not None:
                await repository.close()

    async def number(self) -> int | None:
        """Return the number of the newest version; None if there is no database."""
        if self.context.database is None:
            return None
        return await (await self.repository()).number()

    async def current(self) -> CurrentRules:
        """Return the newest rules. Raises StoreError."""
        if self.context.database is None:
            # Read once: the rules are replaced as a whole, so document and version belong together.
            rules = self.compiled_rules()
            return CurrentRules(rules.document, f'"{rules.version}"', None)
        repository = await self.repository()
        version = await repository.current()
        if version is None:
            return CurrentRules(Document(), etag_of(0), 0)
        try:
            document = await repository.document_of(version)
        except DocumentError as error:
            # Not the caller's mistake: a newer Ratekeeper or another program wrote it.
            raise StoreError(
                f"the newest rules cannot be read by this node: {error}; "
                f"update this node, or roll back to a version that it can read"
            ) from error
        return CurrentRules(document, etag_of(version.number), version.number, version.text)

    async def edit(
        self,
        change: ChangeRequest,
        kind: Kind,
        edit: Callable[[Document], Document],
        text: str | None = None,
    ) -> Version:
        """Make a new version and announce it to the nodes. Raises ChangeRefused, StoreError.

        `text` is the document as its author wrote it, if that is to be kept.
        """
        repository = await self.repository()
        version = await repository.edit(
            lambda document: self._usable(edit(document)),
            kind=kind,
            author=change.author,
            reason=change.reason,
            force=change.force,
            expected=await self._expected(repository, change.condition),
            text=text,
        )
        await self.announce(version.number)
        return version

    async def put_entry(self, change: ChangeRequest, entry: Entry) -> EntryChange:
        """Put an entry beside the document. Raises ChangeRefused, StoreError."""
        repository = await self.repository()
        await self._expected(repository, change.condition)
        made = await repository.entries.put(
            entry, author=change.author, reason=change.reason, force=change.force
        )
        await self.announce(made.seq)
        return made

    async def remove_entries(
        self,
        change: ChangeRequest,
        kind: EntryKind,
        keys: Sequence[str],
        edit: Callable[[Document], Document],
    ) -> Version | EntryChange:
        """Remove entries, and with `edit` also the entry in the document, if there is one.

        Raises NotFound if there is neither.
        """
        repository = await self.repository()
        await self._expected(repository, change.condition)
        made: Version | EntryChange | None = None
        missing: NotFound | None = None
        try:
            edit(await repository.newest_document())  # nearly always raises
            made = await self.edit(change, REMOVE_KINDS[kind], edit)
        except NotFound as error:
            missing = error
        for key in keys:
            with suppress(NotFound):
                made = await repository.entries.remove(
                    kind, key, author=change.author, reason=change.reason
                )
                await self.announce(made.seq)
        if made is None:
            raise missing or NotFound("there is no such entry")
        return made

    async def entries(self) -> EntryRows | None:
        """Return the entries beside the document; None if the rules come from a file."""
        return None if self.context.database is None else (await self.repository()).entries

    async def apply(self, change: ChangeRequest, document: Document, text: str) -> Version:
        """Put a whole document in force, and keep its text. Raises ChangeRefused, StoreError."""
        if change.condition is None or change.condition.any_version:
            return await self.edit(change, "apply", lambda _: document, text)
        repository = await self.repository()
        # Not _expected: a document that is already in force succeeds, whatever version was
        # expected.
        version = await repository.apply(
            self._usable(document),
            author=change.author,
            reason=change.reason,
            force=change.force,
            expected=await self._closest(repository, change.condition),
            text=text,
        )
        await self.announce(version.number)
        return version

    async def rollback(self, change: ChangeRequest, number: int) -> Version:
        """Make a new version with the rules of an old one.

        Raises NotFound, ChangeRefused, StoreError.
        """
        repository = await self.repository()
        self._usable(await repository.document_of(await repository.version(number)))
        for attempt in range(1, ROLLBACK_ATTEMPTS_MAX + 1):
            expected = await self._expected(repository, change.condition)
            try:
                version = await repository.rollback(
                    number,
                    author=change.author,
                    reason=change.reason,
                    expected=await repository.number() if expected is None else expected,
                )
            except VersionConflict:
                if expected is not None or attempt == ROLLBACK_ATTEMPTS_MAX:
                    raise
                continue
            await self.announce(version.number)
            return version
        raise AssertionError("the last attempt returns or raises")

    def _usable(self, document: Document) -> Document:
        """Return a document that the nodes of this service can use. Raises UnusableRules."""
        try:
            self.context.limiter.require_usable(document)
        except ConfigError as error:
            raise UnusableRules(error) from None
        return document

    # ── Counts ─────────────────────────────────────────────────────────────────────────────────

    def checks_of(self, request: Request, cost: int, selection: RuleSelection) -> list[RuleCheck]:
        """Return the rules that a request or its subject has. Raises NotFound, ConfigError."""
        rules = self.compiled_rules()
        if selection.every:
            found = rules.checks_of_subject(request, cost, SUBJECT_RULES_MAX)
        else:
            found = rules.plan(request, cost).checks
        if selection.rule is None:
            return found
        found = [check for check in found if check.rule.id == selection.rule]
        if not found:
            raise NotFound(f"rule {show(selection.rule)} does not count such a request")
        return found

    async def reset(
        self, change: ChangeRequest, request: Request, selection: RuleSelection = _ALL
    ) -> None:
        """Reset the quota of a request's subjects. Raises NotFound, StoreError, ConfigError."""
        limiter = self.context.limiter
        checks = self.checks_of(request, 1, selection)
        await self._operate(
            change, "reset", request, checks, {}, lambda: limiter.reset_rules(checks)
        )

    async def grant(
        self,
        change: ChangeRequest,
        request: Request,
        units: int,
        ttl_seconds: float | None,
        selection: RuleSelection = _ALL,
    ) -> None:
        """Grant units to a request's subjects. Raises NotFound, StoreError, ConfigError."""
        limiter = self.context.limiter
        checks = self.checks_of(request, units_of(units, "units"), selection)
        data = {"units": units, "ttl_seconds": ttl_seconds}
        await self._operate(
            change, "grant", request, checks, data, lambda: limiter.grant_rules(checks, ttl_seconds)
        )

    async def _operate(
        self,
        change: ChangeRequest,
        kind: str,
        request: Request,
        checks: Sequence[RuleCheck],
        data: Mapping[str, Any],
        operate: Callable[[], Awaitable[object]],
    ) -> None:
        """Write an audit entry, then change counts in the store.

        If the entry cannot be written, nothing is changed. If the store fails, a second entry
        records the failure; the store may have made the change nevertheless, if only its reply was
        lost.
        """
        check_signature(change.author, change.reason)
        subjects = {each.rule.id: each.subject.split(SEPARATOR) for each in checks}
        operation = Operation(kind, request, {**data, "subjects": subjects})
        await self._audited(change, operation, operate)

    async def change_shares(
        self, change: ChangeRequest, kind: str, region: str, shares: Mapping[str, Fraction]
    ) -> Mapping[str, str]:
        """Write a table of shares; return the regions that it did not reach, and why.

        Raises ConfigError, ChangeRefused, StoreError.
        """
        regions = self.context.limiter.regions
        if regions is None:
            raise NoRegions
        check_signature(change.author, change.reason)
        known = {name: str(share) for name, share in shares.items()}
        operation = SharesChange(kind, region, {"shares": known})
        return await self._audited(change, operation, lambda: regions.change_shares(shares))

    async def _audited(
        self,
        change: ChangeRequest,
        operation: Operation | SharesChange,
        operate: Callable[[], Awaitable[_Result]],
    ) -> _Result:
        await self._audit(change, operation)
        log.info("%s", operation.logged(change))
        try:
            return await operate()
        except RatekeeperError as error:
            failed = operation.failed(error)
            log.warning("%s", failed.logged(change))
            with suppress(StoreError):
                await self._audit(change, failed)
            raise

    async def _audit(self, change: ChangeRequest, operation: Operation | SharesChange) -> None:
        """Write the entry of an operation; without a database, the log is the audit."""
        if self.context.database is None:
            return
        try:
            audit_log = (await self.repository()).audit_log
            await audit_log.add(
                *(operation.kind, operation.key, operation.text()),
                author=change.author,
                reason=change.reason,
            )
        except StoreError as error:
            raise type(error)(
                f"nothing was changed, because the audit entry cannot be written: {error}"
            ) from error

    async def _expected(
        self, repository: Repository, condition: VersionCondition | None
    ) -> int | None:
        if condition is None:
            return None
        return condition.expected(await repository.number())

    async def _closest(self, repository: Repository, condition: VersionCondition) -> int:
        """Return the expected version, or one that does not exist. Raises VersionConflict."""
        current = await repository.number()
        if not condition.numbers:
            raise VersionConflict(0, current)
        return current if current in condition.numbers else max(condition.numbers)

    async def announce(self, number: int) -> None:
        """Announce a change to the nodes on the same store; otherwise they find it by polling."""
        store = self.context.limiter.store
        if shared_store(store) is None:
            return
        try:
            await asyncio.to_thread(announce, store, number)
        except StoreError as error:
            log.warning("change %s cannot be announced: %s", number, error)
