"""Builds the C extensions. Everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup

KERNEL = Path("src/ratekeeper/decide/kernel")
GRPC = Path("src/ratekeeper/service/grpc")


def extension(name: str, folder: Path, required: str, libraries: tuple[str, ...] = ()) -> Extension:
    """Return the extension made of all C files of a folder.

    Without a compiler, or without the headers of a library, the package installs all the same.
    Where that would go unnoticed (our own tests), the environment variable `required` makes it
    fail.
    """
    return Extension(
        name,
        sources=sorted(str(path) for path in folder.glob("*.c")),
        depends=sorted(str(path) for path in folder.glob("*.h")),
        libraries=list(libraries),
        define_macros=[("_GNU_SOURCE", "1")],
        # Each function begins a cache line. Otherwise a change of one moves all that follow, and a
        # check takes up to 4 % more or less time.
        extra_compile_args=[
            *("-std=c11", "-O3", "-falign-functions=64"),
            *("-fvisibility=hidden", "-Wall", "-Wextra"),
        ],
        optional=os.environ.get(required) != "required",
    )


setup(
    ext_modules=[
        # Without it, decisions are made in Python.
        extension("ratekeeper.decide.kernel._kernel", KERNEL, "RATEKEEPER_KERNEL"),
        # Without it, grpcio serves Envoy.
        extension("ratekeeper.service.grpc._http2", GRPC, "RATEKEEPER_HTTP2", ("nghttp2",)),
    ],
)
