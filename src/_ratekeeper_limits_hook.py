"""Makes `storage_uri="ratekeeper+…"` work without an import (docs/adr/0021).

`ratekeeper_limits.pth` imports this module at every start of Python. It has no imports of its own
but `sys` and `_thread`, and adds a finder that waits for `import limits`. When a program has
imported `limits`, `storage_from_string` gets a test in front: a URI of Ratekeeper imports
`ratekeeper.limits`, which opens it. So a program that does not use such a URI imports nothing of
Ratekeeper.

The finder stays in `sys.meta_path`. `importlib.util.find_spec("limits")` calls it without an
import, so a finder that left after its first call would miss the import. And Python does not lock
the list: an import in another thread could skip the next finder, and fail.

`RATEKEEPER_LIMITS_HOOK=off` switches the hook off; `import ratekeeper.limits` works without it.

PYTEST_DONT_REWRITE: pytest would warn that it cannot rewrite a module that is imported already.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

OURS = ("ratekeeper", "async+ratekeeper")
# A scheme that `limits` does not know and that has one of these was probably meant to be ours.
MISSPELT = ("rate", "keeper")


class LimitsFinder:
    """Finds `limits` by the other finders, and has its loader call `wrap` afterwards."""

    def __init__(self) -> None:
        # The threads that ask the other finders; one of these may ask all finders, as this one.
        self.searching: set[int] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        thread = get_ident()
        if name != "limits" or thread in self.searching:
            return None
        self.searching.add(thread)
        try:
            spec = self.spec_of_others(name, path, target)
        finally:
            self.searching.discard(thread)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = LoaderWithHook(spec.loader)  # type: ignore[assignment]  # it delegates
        return spec

    def spec_of_others(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        """Return what the other finders find."""
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)  # `import` skips a finder without it, too
            if finder is not self and find is not None:
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    return spec
        return None


class LoaderWithHook:
    """A module's own loader, and `wrap` after it."""

    def __init__(self, loader: "Any") -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> "Any":
        if name == "loader":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        # The module keeps its own loader, for everything that asks for its source or resources.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        storage = sys.modules.get("limits.storage")  # not there in another module of this name
        if callable(getattr(storage, "storage_from_string", None)):
            wrap(storage)


def wrap(storage: "Any") -> None:
    """Let `storage_from_string` import `ratekeeper.limits` for a URI of Ratekeeper."""
    original = storage.storage_from_string
    if getattr(original, "__module__", None) == __name__:
        return  # `limits` was reloaded, but not its submodule

    def storage_from_string(storage_string: str, **options: "Any") -> "Any":
        if not isinstance(storage_string, str) or not storage_string.lower().startswith(OURS):
            try:
                return original(storage_string, **options)
            except Exception as error:
                if not misspelt(storage_string, error):
                    raise
        try:
            from ratekeeper.limits import open_storage  # noqa: PLC0415 - only if it is used
        except ImportError as error:
            from limits.errors import ConfigurationError  # noqa: PLC0415 - there is `limits` now

            raise ConfigurationError(
                f"a storage_uri that begins with ratekeeper needs the package ratekeeper "
                f"({error}); install Ratekeeper again, with the extra `limits`"
            ) from error
        return open_storage(storage_string, **options)

    storage_from_string.__doc__ = original.__doc__
    storage_from_string.__wrapped__ = original  # type: ignore[attr-defined]  # as functools.wraps
    storage.storage_from_string = storage_from_string


def misspelt(storage_string: object, error: Exception) -> bool:
    """Return True if `limits` does not know the scheme of a URI, and it resembles ours."""
    scheme = str(storage_string).partition("://")[0].lower()
    unknown = str(error).startswith("unknown storage scheme")
    return unknown and any(part in scheme for part in MISSPELT)


def install() -> None:
    """Add the finder, unless `limits` is imported already or the environment forbids it."""
    import os  # noqa: PLC0415 - `site` has imported it already; a test may not have

    if "limits" not in sys.modules and os.environ.get("RATEKEEPER_LIMITS_HOOK") != "off":
        sys.meta_path.insert(0, LimitsFinder())


install()
