"""Builds the kernel. Everything else about the package is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup

KERNEL = Path("src/tollkeeper/decide/kernel")

setup(
    ext_modules=[
        Extension(
            "tollkeeper.decide.kernel._kernel",
            sources=sorted(str(path) for path in KERNEL.glob("*.c")),
            depends=sorted(str(path) for path in KERNEL.glob("*.h")),
            define_macros=[("_GNU_SOURCE", "1")],
            extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
            # Without a compiler the package installs all the same and decides in Python. Where
            # that would go unnoticed (our own tests), TOLLKEEPER_KERNEL=required makes it fail.
            optional=os.environ.get("TOLLKEEPER_KERNEL") != "required",
        )
    ]
)
