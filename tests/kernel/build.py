"""Compile the C drivers with the table, without Python."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

HERE = Path(__file__).parent
KERNEL = HERE.parents[1] / "src/ratekeeper/decide/kernel"
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(driver: str, folder: Path, *flags: str, compiler: str | None = None) -> Path:
    """Compile `driver` with the table and return the program."""
    program = folder / Path(driver).stem
    cc = _command(compiler, flags)
    table = _table(compiler, flags)
    subprocess.run([*cc, HERE / driver, *table, "-pthread", "-o", program], check=True)
    return program


@cache
def _table(compiler: str | None, flags: tuple[str, ...]) -> list[Path]:
    """Compile the table and return its object files. Drivers with the same flags share them."""
    folder = Path(mkdtemp(prefix="ratekeeper-kernel-"))
    atexit.register(shutil.rmtree, folder)
    sources = [path for path in sorted(KERNEL.glob("*.c")) if not path.name.endswith("module.c")]
    subprocess.run([*_command(compiler, flags), "-c", *sources], check=True, cwd=folder)
    return [folder / f"{path.stem}.o" for path in sources]


def _command(compiler: str | None, flags: tuple[str, ...]) -> list[str]:
    cc = compiler or os.environ.get("CC", "cc")
    return [cc, "-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", f"-I{KERNEL}", *flags]
