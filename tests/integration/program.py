"""Run a program of this folder, which forks, and return what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

# Longer than any run takes. A run that reaches it hangs.
HANGS_AFTER_SECONDS = 120


def printed(module: str, *arguments: object) -> dict[str, Any]:
    """Run `tests.integration.<module>` in another process; return its JSON object."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.integration.{module}", *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=HANGS_AFTER_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
