"""Compile the C drivers with the table, without Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
KERNEL = HERE.parents[1] / "src/tollkeeper/decide/kernel"
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(driver: str, folder: Path, *flags: str, compiler: str | None = None) -> Path:
    """Compile `driver` with the table and return the program."""
    program = folder / Path(driver).stem
    sources = [path for path in sorted(KERNEL.glob("*.c")) if not path.name.endswith("module.c")]
    subprocess.run(
        [
            compiler or os.environ.get("CC", "cc"),
            *("-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", f"-I{KERNEL}"),
            *flags,
            *(HERE / driver, *sources),
            *("-pthread", "-o", program),
        ],
        check=True,
    )
    return program
