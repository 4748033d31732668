"""The start-up hook: it registers our storages, costs nothing else, and never breaks a start."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from sysconfig import get_path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from limits.errors import ConfigurationError

import _ratekeeper_limits_hook as hook


def python(code: str, **environment: str) -> str:
    """Run a program in a new Python; return its output."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ran.stdout + ran.stderr


def test_the_file_is_installed() -> None:
    """Python reads it at its start. Its line is an import that may fail, and nothing else."""
    line = Path(get_path("platlib"), "ratekeeper_limits.pth").read_text()
    assert line.startswith("import sys; exec(")
    assert line.count("\n") == 1


def test_a_program_imports_ratekeeper_only_if_it_uses_it() -> None:
    """Neither Python's start nor `import limits` does. The modules keep their own loaders."""
    said = python(
        "import sys\n"
        "assert 'ratekeeper' not in sys.modules\n"
        "from limits.storage import storage_from_string\n"
        "import limits\n"
        "for loader in (limits.__spec__.loader, limits.__loader__):\n"
        "    assert type(loader).__name__ == 'SourceFileLoader'\n"
        "storage_from_string('memory://').timer.cancel()\n"
        "assert 'ratekeeper' not in sys.modules\n"
        "print(storage_from_string('ratekeeper+memory://').incr('ann', 60))\n"
        "assert 'ratekeeper.limits' in sys.modules\n"
    )
    assert said == "1\n"


def test_the_environment_switches_it_off() -> None:
    """Then `import ratekeeper.limits` registers the storages."""
    said = python(
        "from limits.storage import storage_from_string\n"
        "from limits.errors import ConfigurationError\n"
        "try: storage_from_string('ratekeeper+memory://')\n"
        "except ConfigurationError as error: print(error)\n"
        "import ratekeeper.limits\n"
        "print(storage_from_string('ratekeeper+memory://').incr('ann', 60))\n",
        RATEKEEPER_LIMITS_HOOK="off",
    )
    assert said == "unknown storage scheme : ratekeeper+memory://\n1\n"


@pytest.mark.parametrize("content", ["LIMIT = 5", "raise RuntimeError('their own error')"])
def test_another_module_of_that_name_is_imported_as_ever(content: str, tmp_path: Path) -> None:
    """A program may have its own `limits.py`; its errors are its own."""
    (tmp_path / "limits.py").write_text(content)
    said = python(
        "try:\n import limits\n print(limits.LIMIT)\nexcept RuntimeError as error:\n print(error)",
        PYTHONPATH=str(tmp_path),
    )
    assert said == ("5\n" if "LIMIT" in content else "their own error\n")


def test_another_package_of_that_name_keeps_its_own_values(tmp_path: Path) -> None:
    """Also if it has the same submodule, with something else in it."""
    package = tmp_path / "limits"
    package.mkdir()
    (package / "__init__.py").write_text("from . import storage")
    (package / "storage.py").write_text("storage_from_string = 5")
    program = "import limits\nprint(limits.storage.storage_from_string)"
    path = os.pathsep.join((str(tmp_path), str(Path(hook.__file__).parent)))
    assert python(program, PYTHONPATH=path) == "5\n"


def test_a_loader_can_be_copied() -> None:
    """A tool that finds `limits` without importing it may copy what it found."""
    original = OldLoader()
    assert copy.copy(hook.LoaderWithHook(original)).loader is original


def test_other_imports_are_left_to_the_other_finders() -> None:
    """Also `limits` itself if no finder knows it, and submodules of it."""
    finder = hook.LimitsFinder()
    assert finder.find_spec("json") is None
    assert finder.find_spec("limits.storage", ["/"]) is None


def test_without_limits_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import fails as without the hook. The list of finders is not changed: it has no lock."""
    finder = hook.LimitsFinder()
    monkeypatch.setattr(sys, "meta_path", [finder])
    assert finder.find_spec("limits") is None
    assert sys.meta_path == [finder]


@pytest.mark.parametrize(
    "before",
    [
        "assert importlib.util.find_spec('limits').loader.is_package('limits')",
        "import limits; importlib.reload(limits)",
        "import limits; [sys.modules.pop(m) for m in list(sys.modules) if m[:6] == 'limits']",
        "import _ratekeeper_limits_hook as hook; importlib.reload(hook)",
    ],
    ids=["find_spec", "reload", "imported again", "installed twice"],
)
def test_it_outlives_other_uses_of_the_finders(before: str) -> None:
    """A program may test whether `limits` is installed, reload it, or import it again."""
    said = python(
        f"import importlib.util, sys\n{before}\n"
        "from limits.storage import storage_from_string\n"
        "assert not hasattr(storage_from_string.__wrapped__, '__wrapped__')\n"
        "print(storage_from_string('ratekeeper+memory://').incr('ann', 60))\n"
    )
    assert said == "1\n"


class AsksAll:
    """A finder that asks all others, as ours does."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and (found := finder.find_spec(name, None, None)):
                return found
        return None


def test_two_finders_that_ask_all_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked by the other, and passes."""
    found = ModuleSpec("limits", OldLoader())
    last = SimpleNamespace(find_spec=lambda *args: found)
    finder = hook.LimitsFinder()
    monkeypatch.setattr(sys, "meta_path", [finder, AsksAll(), last])
    assert finder.find_spec("limits") is found
    assert finder.searching == set()


class OldLoader:
    """A loader from before Python 3.4."""

    def load_module(self, name: str) -> ModuleType:
        raise AssertionError(name)


def test_an_old_loader_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no `exec_module` that could be wrapped."""
    found = ModuleSpec("limits", OldLoader())
    finder = hook.LimitsFinder()
    other = SimpleNamespace(find_spec=lambda *args: found)
    monkeypatch.setattr(sys, "meta_path", [finder, object(), other])
    assert finder.find_spec("limits") is found
    assert type(found.loader) is OldLoader


def test_a_failed_import_appears_when_the_scheme_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy; other storages go on working."""
    opened: list[Any] = []
    storage = SimpleNamespace(
        storage_from_string=lambda uri, **options: opened.append((uri, options)),
        ConfigurationError=ConfigurationError,
    )
    hook.wrap(storage)
    monkeypatch.setitem(sys.modules, "ratekeeper.limits", None)
    storage.storage_from_string("redis://localhost", key_prefix="shop")
    assert opened == [("redis://localhost", {"key_prefix": "shop"})]
    with pytest.raises(ConfigurationError, match="install Ratekeeper again, with the extra"):
        storage.storage_from_string("ratekeeper+memory://")
    with pytest.raises(ConfigurationError):
        storage.storage_from_string("async+ratekeeper+memory://")


@pytest.mark.parametrize(
    "uri", ["ratkeeper+redis://:s3cret@h", "ratekeper+redis://h", " ratekeeper+redis://h"]
)
def test_a_misspelt_ratekeeper_is_explained(uri: str) -> None:
    """`limits` does not know the scheme; its message has no next step, and shows the password."""
    said = python(
        "from limits.storage import storage_from_string\n"
        "from limits.errors import ConfigurationError\n"
        f"try: storage_from_string({uri!r})\n"
        "except ConfigurationError as error: print(error)\n"
    )
    assert "the closest is ratekeeper+redis://, and a complete example is" in said
    assert "s3cret" not in said


def test_an_error_of_another_storage_is_left_alone() -> None:
    """Also if its scheme resembles ours; and unknown schemes that do not get limits' message."""

    def original(uri: str, **options: object) -> None:
        raise ConfigurationError("no host" if "book" in uri else f"unknown storage scheme : {uri}")

    storage = SimpleNamespace(storage_from_string=original)
    hook.wrap(storage)
    with pytest.raises(ConfigurationError, match=r"^no host$"):
        storage.storage_from_string("bookkeeper://")
    with pytest.raises(ConfigurationError, match=r"^unknown storage scheme : blah://$"):
        storage.storage_from_string("blah://")


def test_it_is_not_installed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has `limits` already gets no finder."""
    finders: list[Any] = []
    monkeypatch.setattr(sys, "meta_path", finders)
    hook.install()
    assert finders == []
    monkeypatch.delitem(sys.modules, "limits")
    hook.install()
    assert [type(finder) for finder in finders] == [hook.LimitsFinder]
    monkeypatch.setenv("RATEKEEPER_LIMITS_HOOK", "off")
    hook.install()
    assert len(finders) == 1
