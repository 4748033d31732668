"""Build the packages of a release into dist/, and try them: `make release`. It uploads nothing.

It refuses a folder with changes that are not committed, and a version that CHANGELOG.md does not
describe. `tests/test_packages.py` builds the wheel and the source distribution, checks their
contents and metadata, installs each into new environments and runs them there. At the end, this
program prints the command that publishes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

VERSION: Final = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
# The newest section: its heading, and the first paragraph below it.
SECTION: Final = re.compile(r"^## (.+)\n\n?(.*)", re.MULTILINE)
UNPUBLISHED: Final = "Nothing is published yet"


def git(*arguments: str) -> str:
    """Return what git prints, or end with its error."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else sys.exit(done.stderr)


def version_of(root: Path) -> str:
    """Return the version of the package, without importing it."""
    text = (root / "src/ratekeeper/core/version.py").read_text(encoding="utf-8")
    return VERSION.findall(text)[0]


def heading_of(root: Path, version: str) -> str:
    """Return the heading of the newest section of CHANGELOG.md, or end if it is of another version.

    The section may still be called [Unreleased] if its first line names the version.
    """
    heading, first = SECTION.findall((root / "CHANGELOG.md").read_text(encoding="utf-8"))[0]
    if version not in re.findall(r"\d[\w.]*\w", f"{heading} {first}"):
        sys.exit(
            f"the package has the version {version}, but the newest section of CHANGELOG.md is "
            f"{heading!r} and begins with {first!r}; change src/ratekeeper/core/version.py or "
            f"CHANGELOG.md, so that both name the same version"
        )
    return heading


def build_and_try(root: Path, dist: Path) -> None:
    """Build into an empty folder, and test the files there; end if a test fails."""
    shutil.rmtree(dist, ignore_errors=True)
    tests = [sys.executable, "-m", "pytest", "-q", "tests/test_packages.py"]
    environment = {**os.environ, "RATEKEEPER_DIST": str(dist)}
    if subprocess.run(tests, cwd=root, env=environment, check=False).returncode:
        shutil.rmtree(dist, ignore_errors=True)
        sys.exit("a package failed its tests; dist/ was removed")


def main() -> None:
    """Check the folder and the version, build and try the packages, print the next step."""
    root = Path(git("rev-parse", "--show-toplevel").strip())
    if changes := git("-C", str(root), "status", "--porcelain"):
        sys.exit(f"commit or remove these changes first, a release has only commits:\n{changes}")
    version = version_of(root)
    heading = heading_of(root, version)
    dist = root / "dist"
    build_and_try(root, dist)
    files = sorted(path.relative_to(root) for path in dist.iterdir())
    print(f"ratekeeper {version} is built, and nothing was uploaded:", *files, sep="\n  ")
    if version not in heading:
        print(f"\nBefore you publish: name the section {heading} of CHANGELOG.md [{version}].")
    # The index shows the README as the description of the package.
    if UNPUBLISHED in (root / "README.md").read_text(encoding="utf-8"):
        print(f"\nBefore you publish: README.md says {UNPUBLISHED!r}. Install it by name there.")
    print(
        "\nThe wheel is for this machine; an index accepts only the wheels of `cibuildwheel "
        "--platform linux --output-dir dist` (Docker).\nThis command publishes the source "
        "distribution, from which pip compiles the package:\n"
        f"\n  twine upload dist/ratekeeper-{version}.tar.gz"
    )


if __name__ == "__main__":
    main()
