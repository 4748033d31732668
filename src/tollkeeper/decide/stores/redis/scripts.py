"""The scripts that run inside Redis: `.lua` files, each behind what they have in common.

A script is known to a server by the SHA-1 of its text, so two versions of Tollkeeper on one server
never run each other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the name that a server gives it."""

    text: bytes
    sha: bytes


def _load(name: str) -> Script:
    folder = files("tollkeeper.decide.stores.redis").joinpath("lua")
    parts = (folder.joinpath(f"{part}.lua").read_bytes() for part in ("state", name))
    text = b"\n".join(parts)
    # Redis names scripts by their SHA-1; nothing secret hangs on it.
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


CHECK: Final = _load("check")
REFUND: Final = _load("refund")
GRANT: Final = _load("grant")
RESET: Final = _load("reset")
