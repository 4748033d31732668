"""One redis-server: plain, or with a password and users."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from tests.redis_servers.ports import HOST
from tests.redis_servers.server import Server

# Every redis-server of the harness is on loopback only, and writes no data to disk by default.
COMMON_LINES = (f"bind {HOST}", "protected-mode no", "daemonize no", 'save ""')


@dataclass(frozen=True, slots=True)
class User:
    """A user of the server; `rules` have the syntax of ACL SETUSER."""

    name: str
    password: str
    rules: str = "~* &* +@all"

    @property
    def line(self) -> str:
        """Return the configuration line. The password is hashed, so it may have any character."""
        digest = hashlib.sha256(self.password.encode()).hexdigest()
        return f"user {self.name} on #{digest} {self.rules}"


class Single(Server):
    """One redis-server, without keys at first. A `with` block starts and stops it.

    `password`  the default user's, which is the administrator; without it, any client may do all
    `users`     further users; `uri` names the first of them
    `aof`       write and sync each command to disk, so that it survives `kill`
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
        """Return the store's URI, with the user's login."""
        return f"redis://{self._login_part}{HOST}:{self.port}/0"

    @property
    def _login_part(self) -> str:
        if not self.user.password:
            return ""
        return f"{quote(self.user.name, safe='')}:{quote(self.user.password, safe='')}@"

    def flush(self) -> None:
        """Remove every key, in well under a millisecond."""
        self.admin.flushall()
