"""The HTTP/2 session in plain C under the compiler's sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kernel.build import SANITIZED

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src/ratekeeper/service/grpc"
WRAPPED = ("malloc", "calloc", "realloc", "free", "nghttp2_session_server_new2")
ROUNDS = 500


@pytest.mark.long
def test_random_sessions_pass_the_sanitizers(tmp_path: Path) -> None:
    """Frames, damaged frames, replies and time in any order do no harm.

    There is no address error, undefined behaviour, leak or hang, the events of each stream come in
    order, and memory is bounded. In half of the rounds an allocation fails, and all after it; a few
    calls run once for each of their allocations.
    """
    program = tmp_path / "session_driver"
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            *("-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", f"-I{SOURCE}"),
            *(*SANITIZED, HERE / "session_driver.c", HERE / "fuzz_session.c"),
            *(SOURCE / f"{name}.c" for name in ("session", "requests", "replies")),
            *(f"-Wl,--wrap={name}" for name in WRAPPED),
            *("-lnghttp2", "-o", program),
        ],
        check=True,
    )
    done = subprocess.run(
        [program, "1", str(ROUNDS)], capture_output=True, check=False, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout == f"{ROUNDS} rounds\n"
