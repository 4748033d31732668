"""Builds the C extensions. Everything else about the package is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup

KERNEL = Path("src/tollkeeper/decide/kernel")
GRPC = Path("src/tollkeeper/service/grpc")


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
        extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
        optional=os.environ.get(required) != "required",
    )


setup(
    ext_modules=[
        # Without it, decisions are made in Python.
        extension("tollkeeper.decide.kernel._kernel", KERNEL, "TOLLKEEPER_KERNEL"),
        # Without it, grpcio serves Envoy.
        extension("tollkeeper.service.grpc._http2", GRPC, "TOLLKEEPER_HTTP2", ("nghttp2",)),
    ]
)
