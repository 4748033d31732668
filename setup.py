"""Builds the C extensions, and adds the start-up hook. Everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

KERNEL = Path("src/ratekeeper/decide/kernel")
GRPC = Path("src/ratekeeper/service/grpc")
HOOK = Path("src/ratekeeper_limits.pth")


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


class BuildWithHook(build_py):
    """Puts the .pth file beside the packages: Python reads it there at its start (docs/adr/0021).

    An editable installation takes from the build only what would be installed as it is.
    """

    def run(self) -> None:
        super().run()
        editable = self.editable_mode
        folder = self.get_finalized_command("install").install_lib if editable else self.build_lib
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.copy_file(HOOK, folder, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, str(Path(self.build_lib, HOOK.name))]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), str(HOOK)]


setup(
    cmdclass={"build_py": BuildWithHook},
    ext_modules=[
        # Without it, decisions are made in Python.
        extension("ratekeeper.decide.kernel._kernel", KERNEL, "RATEKEEPER_KERNEL"),
        # Without it, grpcio serves Envoy.
        extension("ratekeeper.service.grpc._http2", GRPC, "RATEKEEPER_HTTP2", ("nghttp2",)),
    ],
)
