"""One redis-server: plain, or with a password and users."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from tests.redis_servers.ports import HOST
from tests.redis_servers.server import Server

# Every redis-server of the harness: loopback only, and nothing on disk unless asked for.
COMMON_LINES = (f"bind {HOST}", "protected-mode no", "daemonize no", 'save ""')


@dataclass(frozen=True, slots=True)
class User:
    """Someone who may log in, and what for: `rules` as ACL SETUSER takes them."""

    name: str
    password: str
    rules: str = "~* &* +@all"

    @property
    def line(self) -> str:
        """Its line of the configuration. Hashed, a password may have any character in it."""
        digest = hashlib.sha256(self.password.encode()).hexdigest()
        return f"user {self.name} on #{digest} {self.rules}"


class Single(Server):
    """One redis-server, empty at first. In a `with` block it is started and stopped.

    `password`  of the default user, who administers; without it, everyone may do everything
    `users`     who else may log in; the first of them is the one in `uri`
    `aof`       write each command down and sync it, so that it survives `kill`
    `lines`     further lines of its configuration
    """

    def __init__(
        self,
        *,
        password: str = "",
        users: Sequence[User] = (),
        aof: bool = False,
        lines: Sequence[str] = (),
        login: Mapping[str, object] | None = None,
    ) -> None:
        chosen = [*COMMON_LINES, *(user.line for user in users)]
        if password:
            chosen.append(f"requirepass {json.dumps(password, ensure_ascii=False)}")
        if aof:
            chosen += ["appendonly yes", "appendfsync always"]
        super().__init__(
            "redis-server",
            ["port {port}", *chosen, *lines],
            {"password": password or None, **(login or {})},
        )
        self.user = users[0] if users else User("", password)

    @property
    def uri(self) -> str:
        """The store's URI, with who logs in."""
        return f"redis://{self._who}{HOST}:{self.port}/0"

    @property
    def _who(self) -> str:
        if not self.user.password:
            return ""
        return f"{quote(self.user.name, safe='')}:{quote(self.user.password, safe='')}@"

    def flush(self) -> None:
        """Remove every key, in well under a millisecond."""
        self.admin.flushall()
