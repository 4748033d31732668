"""What the admin API asks and changes: the rules in their database, and the limiter of this node.

Rules are read where they are changed, in the database: what was just written is read back, although
the limiter of this node hears of it a moment later. Where rules come from a file, that file is the
one place to change them; then they are read from the limiter, and every change is refused.

The database is opened at the first request that needs it, and a node whose database is away still
answers everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from tollkeeper.control.follow import announce
from tollkeeper.control.repository import Kind, Repository, Version
from tollkeeper.core.errors import ChangeRefused, StoreError, VersionConflict
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.rules.compiled import CompiledRules
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import DocumentError
from tollkeeper.rules.document.writing import to_yaml
from tollkeeper.service.http.tokens import Tokens

# Each lost race is a change that somebody else got through; whoever rolls back is in a hurry.
ROLLBACK_ATTEMPTS_MAX: Final = 20

log = logging.getLogger("tollkeeper.admin")


class AdminNode(Protocol):
    """What the admin API needs of a node."""

    limiter: AsyncLimiter
    tokens: Tokens
    node_id: str
    started_ns: int
    database: str | None


class NoDatabase(ChangeRefused):
    """The rules come from a file, and that is where they are changed."""

    def __init__(self, source: str) -> None:
        where = f" ({source})" if source else ""
        super().__init__(
            f"the rules of this node come from a file{where} and have no versions; change the "
            f"file, or start with `tollkeeper serve --rules sqlite:///rules.db`"
        )


class InForce(NamedTuple):
    """The rules as they are."""

    document: Document
    etag: str
    """In quotes, as HTTP has it: `"v12"`, or of a file the beginning of its hash."""
    number: int | None
    """Of the version; 0: there is none yet; None: the rules come from a file."""
    text: str | None = None
    """The document as it is kept; None where it is yet to be written."""

    def yaml(self) -> str:
        """The document as text."""
        return to_yaml(self.document) if self.text is None else self.text


class Condition(NamedTuple):
    """Of which version a change is to be."""

    numbers: frozenset[int] | None = None
    """One of these; empty: none that there is."""
    any_version: bool = False
    """Whatever version there is, but there is one."""

    def expected(self, current: int) -> int | None:
        """The version to expect; None: whatever it is. Raises VersionConflict."""
        if self.any_version and current == 0:
            raise VersionConflict(1, 0)
        if self.any_version or self.numbers is None:
            return None
        if current not in self.numbers:
            raise VersionConflict(max(self.numbers, default=0), current)
        return current


class Asked(NamedTuple):
    """Who wants a change and why, whatever it is."""

    author: str
    reason: str = ""
    force: bool = False
    condition: Condition | None = None

    def because(self, reason: str | None) -> Asked:
        """With the reason that stands in the body, if one does."""
        return self._replace(reason=reason) if reason else self


def etag_of(number: int) -> str:
    """What a version is called in HTTP's conditions.

    >>> etag_of(12)
    '"v12"'
    """
    return f'"v{number}"'


class Plane:
    """The rules and the limiter of one node. For one event loop."""

    def __init__(self, node: AdminNode) -> None:
        self.node = node
        self._repository: Repository | None = None
        self._opening = asyncio.Lock()

    def policy(self) -> CompiledRules:
        """The rules in force in this node, now."""
        return self.node.limiter.compiled_rules

    async def repository(self) -> Repository:
        """The database of the rules. Raises NoDatabase, StoreError."""
        url = self.node.database
        if url is None:
            raise NoDatabase(self.node.limiter.rules_status().source)
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
        """The number of the newest version; None where there is no database."""
        if self.node.database is None:
            return None
        return await (await self.repository()).number()

    async def in_force(self) -> InForce:
        """The newest rules. Raises StoreError."""
        if self.node.database is None:
            # One look at the policy, which is replaced whole: document and version belong together.
            policy = self.policy()
            return InForce(policy.document, f'"{policy.version}"', None)
        repository = await self.repository()
        version = await repository.current()
        if version is None:
            return InForce(Document(), etag_of(0), 0)
        try:
            document = await repository.document_of(version)
        except DocumentError as error:
            # Not the caller's mistake: a newer Tollkeeper wrote it, or somebody's own program did.
            raise StoreError(
                f"the newest rules cannot be read by this node: {error}; "
                f"update it, or go back to a version that it knows"
            ) from error
        return InForce(document, etag_of(version.number), version.number, version.text)

    async def change(
        self, asked: Asked, kind: Kind, edit: Callable[[Document], Document]
    ) -> Version:
        """Make a new version by an edit, and tell the nodes. Raises ChangeRefused, StoreError."""
        repository = await self.repository()
        version = await repository.edit(
            edit,
            kind=kind,
            author=asked.author,
            reason=asked.reason,
            force=asked.force,
            expected=await self._expected(repository, asked.condition),
        )
        await self._announce(version)
        return version

    async def apply(self, asked: Asked, document: Document) -> Version:
        """Put a whole document in force. Raises ChangeRefused, StoreError."""
        if asked.condition is None or asked.condition.any_version:
            return await self.change(asked, "apply", lambda _: document)
        repository = await self.repository()
        # Not _expected: a document that is in force already is in force, whichever was expected.
        version = await repository.apply(
            document,
            author=asked.author,
            reason=asked.reason,
            force=asked.force,
            expected=await self._closest(repository, asked.condition),
        )
        await self._announce(version)
        return version

    async def rollback(self, asked: Asked, number: int) -> Version:
        """Go back to an old version. Raises Missing, ChangeRefused, StoreError."""
        repository = await self.repository()
        for attempt in range(1, ROLLBACK_ATTEMPTS_MAX + 1):
            expected = await self._expected(repository, asked.condition)
            try:
                version = await repository.rollback(
                    number,
                    author=asked.author,
                    reason=asked.reason,
                    expected=await repository.number() if expected is None else expected,
                )
            except VersionConflict:
                if expected is not None or attempt == ROLLBACK_ATTEMPTS_MAX:
                    raise
                continue
            await self._announce(version)
            return version
        raise AssertionError("the last attempt returns or raises")

    async def _expected(self, repository: Repository, condition: Condition | None) -> int | None:
        if condition is None:
            return None
        return condition.expected(await repository.number())

    async def _closest(self, repository: Repository, condition: Condition) -> int:
        """The version that was expected, or one that is not there. Raises VersionConflict."""
        current = await repository.number()
        if not condition.numbers:
            raise VersionConflict(0, current)
        return current if current in condition.numbers else max(condition.numbers)

    async def _announce(self, version: Version) -> None:
        """Tell the nodes that share our store; if that fails, they find out by asking."""
        store = self.node.limiter.store
        if store.channel is None:
            return
        try:
            await asyncio.to_thread(announce, store, version.number)
        except StoreError as error:
            log.warning("version %s is not announced: %s", version.number, error)
