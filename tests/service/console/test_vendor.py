"""The vendored files are what tools/vendor.py built, each with the licence of its package."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("src/ratekeeper/service/console/static/vendor", "tests/console/vendor")
PINS = json.loads((ROOT / "tools/vendor.json").read_text())


def test_every_file_has_its_recorded_checksum() -> None:
    """No file was edited, added or lost since it was built."""
    found = {
        path.relative_to(ROOT).as_posix(): sha256(path.read_bytes()).hexdigest()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    assert found == PINS["files"]
    assert len(found) > 20


def test_every_package_is_pinned() -> None:
    """An exact version, and the SHA-512 of its archive."""
    for name, pin in PINS["packages"].items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", pin["version"]), name
        assert re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", pin["integrity"]), name
    assert PINS["packages"]["htmx.org"]["version"].startswith("2.")


def test_every_package_has_its_licence() -> None:
    """The bundler makes files and is in none; every other package is, and its licence is too."""
    packages = {
        name.removeprefix("@").replace("/", "-"): (name, pin["version"])
        for name, pin in PINS["packages"].items()
        if not name.startswith("@esbuild/")
    }
    licences = {path.stem: path for folder in FOLDERS for path in (ROOT / folder).rglob("*.txt")}
    assert licences.keys() == packages.keys()
    for stem, (name, version) in packages.items():
        text = licences[stem].read_text()
        assert text.startswith(f"{name} {version} (")
        assert re.search("permission|licen[cs]e", text.partition("\n")[2], re.IGNORECASE), name


def test_no_file_names_a_source_map() -> None:
    """A browser would ask for it, and it is not there."""
    for name in PINS["files"]:
        assert b"# sourceMappingURL" not in (ROOT / name).read_bytes()[-300:], name


def test_the_package_contains_the_files() -> None:
    """Each is matched by the package data, so that an installed console has it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["ratekeeper"]
    for name in PINS["files"]:
        if name.startswith("src/"):
            assert any(fnmatch(name, f"src/ratekeeper/{pattern}") for pattern in patterns), name
