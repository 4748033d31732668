"""`make release` as a dry run, in a small repository whose tests of packages only write files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

RELEASE = Path(__file__).parents[1] / "tools/release.py"
PACKAGES = """
import os
from pathlib import Path

def test_packages():
    dist = Path(os.environ["RATEKEEPER_DIST"])
    dist.mkdir()
    (dist / "ratekeeper-0.2.0.tar.gz").touch()
    assert not Path("broken").exists()
"""
CHANGES = "# Changes\n\n## [0.2.0] - 2026-12-01\n\nMore.\n\n## [0.1.0]\n"


def git(folder: Path, *arguments: str) -> None:
    """Run git with an author."""
    author = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository of version 0.2.0, committed."""
    files = {
        "src/ratekeeper/core/version.py": '__version__ = "0.2.0"\n',
        "CHANGELOG.md": CHANGES,
        "README.md": "# Shop\n\nInstall it by name.\n",
        "tests/test_packages.py": PACKAGES,
        ".gitignore": "dist/\n__pycache__/\n.pytest_cache/\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    """Commit all files."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "files")


def release(folder: Path) -> tuple[int, str]:
    """Run the program; return its exit code and output."""
    command = [sys.executable, str(RELEASE)]
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_release_ends_with_the_command_that_publishes_it(folder: Path) -> None:
    """It is printed and not run. Files of an earlier release are gone."""
    (folder / "dist").mkdir()
    (folder / "dist/old.whl").touch()
    code, printed = release(folder)
    assert (code, printed.endswith("\n  twine upload dist/ratekeeper-0.2.0.tar.gz\n")) == (0, True)
    assert [path.name for path in (folder / "dist").iterdir()] == ["ratekeeper-0.2.0.tar.gz"]
    assert "Before you publish" not in printed


def test_a_section_that_is_not_named_yet_is_to_be_named(folder: Path) -> None:
    """It says which version it will be."""
    text = "# Changes\n\n## [Unreleased]\n\nThis will be 0.2.0, the first release.\n"
    (folder / "CHANGELOG.md").write_text(text, encoding="utf-8")
    commit(folder)
    code, printed = release(folder)
    assert code == 0, printed
    assert "name the section [Unreleased] of CHANGELOG.md [0.2.0]" in printed


def test_a_readme_that_installs_from_a_checkout_is_to_be_changed(folder: Path) -> None:
    """An index shows the README to users who install by name."""
    readme = (RELEASE.parents[1] / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(readme, encoding="utf-8")
    commit(folder)
    code, printed = release(folder)
    assert code == 0, printed
    assert ("Before you publish: README.md says" in printed) == ("from a checkout" in readme)


@pytest.mark.parametrize("name", ["CHANGELOG.md", "new.txt"])
def test_a_folder_with_changes_is_refused(folder: Path, name: str) -> None:
    """Also one with a file that is not tracked; before anything is built."""
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write("more")
    code, printed = release(folder)
    assert (code, name in printed) == (1, True)
    assert not (folder / "dist").exists()


def test_a_version_without_a_section_is_refused(folder: Path) -> None:
    """Neither the next version nor a longer one has the section of 0.2.0."""
    for version in ("0.3.0", "0.2.0rc1", "0.2"):
        text = f'__version__ = "{version}"\n'
        (folder / "src/ratekeeper/core/version.py").write_text(text, encoding="utf-8")
        commit(folder)
        code, printed = release(folder)
        assert (code, f"has the version {version}," in printed) == (1, True), printed


def test_no_command_is_printed_for_packages_that_do_not_work(folder: Path) -> None:
    """The files that failed are removed."""
    (folder / "broken").touch()
    commit(folder)
    code, printed = release(folder)
    assert (code, "twine" in printed) == (1, False)
    assert not (folder / "dist").exists()
