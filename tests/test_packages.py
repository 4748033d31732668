"""The packages as a user gets them: built, installed into new environments, and tried there.

The source distribution and the wheel are built once for all tests, from a copy of the files that
git tracks (and of new ones that it does not ignore), so that a file in the working folder cannot
replace one that is missing in the repository. An environment is new and empty, and pip installs
with `--no-index`: the base package has no dependencies.

The service and a type checker need the extras. Their environment finds them in the folder of the
environment that runs the tests, through a `.pth` file. So no run downloads 60 packages, and the
extras have the versions that all other tests use. That folder comes last on the path, and Python
does not read the `.pth` files in it: `ratekeeper` itself is the installed wheel.

`make release` (`tools/release.py`) runs these tests, and sets RATEKEEPER_DIST: the packages are
then built into that folder, where they stay.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import ratekeeper
from tests.service_process import ServiceProcess

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_path("purelib"))
SMOKE_TEST = ROOT / "tools/smoke_test.py"
TYPED_USES = ROOT / "tests/typing_public_api.py"
STEM = f"ratekeeper-{ratekeeper.__version__}"
RUN_SECONDS_MAX = 300
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

# Besides the files of src/, a wheel has exactly these.
COMPILED = {f"ratekeeper/decide/kernel/_kernel{SUFFIX}", f"ratekeeper/service/grpc/_http2{SUFFIX}"}
METADATA = {
    f"{STEM}.dist-info/{name}"
    for name in (
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
        "licenses/licenses/libnghttp2.txt",
        "top_level.txt",
    )
}
# Besides the files of src/, a source distribution has exactly these, and what setuptools writes.
SOURCES = {
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "licenses/libnghttp2.txt",
    "pyproject.toml",
    "setup.py",
}
WRITTEN = {"PKG-INFO", "setup.cfg"}
# A kind of file that is forgotten is found even if git does not track it, either.
KINDS = {".c", ".css", ".h", ".html", ".js", ".json", ".lua", ".proto", ".py", ".pyi"}
KINDS |= {".svg", ".txt", ".yaml"}


@dataclass(frozen=True)
class Packages:
    """The files that `python -m build` made, and the tree that it made them of."""

    tree: Path
    sdist: Path
    wheel: Path

    @property
    def sources(self) -> set[str]:
        """The files of src/, as paths in a wheel."""
        src = self.tree / "src"
        # The build writes the list of its files beside the package.
        return {
            path.relative_to(src).as_posix()
            for path in src.rglob("*")
            if path.is_file() and "ratekeeper.egg-info" not in path.parts
        }

    @property
    def wheel_files(self) -> dict[str, bytes]:
        """The content of the wheel by path."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {each: archive.read(each) for each in archive.namelist()}


def run(command: Sequence[object], cwd: Path, **env: str) -> str:
    """Run a command in a folder; return its output. Its environment has no PYTHONPATH."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env={**clean, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=RUN_SECONDS_MAX,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def tracked() -> list[str]:
    """Return the files that a release has; without git, those of our folders."""
    if (ROOT / ".git").exists() and (git := shutil.which("git")):
        listed = run([git, "ls-files", "-z", "-co", "--exclude-standard"], ROOT)
        return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    found = [*(ROOT / "src").rglob("*"), *(ROOT / name for name in SOURCES)]
    return [
        path.relative_to(ROOT).as_posix()
        for path in found
        if path.is_file()
        and path.suffix not in (".pyc", ".so")
        and "ratekeeper.egg-info" not in path.parts
    ]


def build(folder: Path, dist: Path) -> None:
    """Copy the tracked files, and build the source distribution and the wheel from the copy."""
    tree = folder / "tree"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    # Each from the tree: without the options, `build` makes the wheel of the source distribution.
    builder = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel"]
    required = {"RATEKEEPER_KERNEL": "required", "RATEKEEPER_HTTP2": "required"}
    run([*builder, "--outdir", dist, tree], folder, **required)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one of the processes that run the tests work at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """The packages, built once, also if several processes run the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    folder.mkdir(exist_ok=True)
    dist = Path(os.environ.get("RATEKEEPER_DIST", folder / "dist"))
    with locked(folder / "lock"):
        if not (folder / "built").exists():
            build(folder, dist)
            (folder / "built").touch()
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return Packages(folder / "tree", sdist, wheel)


@dataclass(frozen=True)
class Environment:
    """A new virtual environment without any package, not even pip."""

    folder: Path

    @classmethod
    def new(cls, folder: Path) -> Environment:
        """Create it."""
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
        return cls(folder)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    @property
    def site(self) -> Path:
        """The folder that packages are installed into."""
        return self.folder / SITE.relative_to(sys.prefix)

    def pip_install(self, *arguments: object, **env: str) -> str:
        """Install without an index; return the output."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        chosen = ["--no-index", "--no-compile", "--no-cache-dir"]
        return run([*pip, "install", *chosen, *arguments], self.folder, **env)

    def install(self, package: Path, *options: str, **env: str) -> None:
        """Install a package from a file, and nothing else."""
        self.pip_install("--no-deps", *options, package, **env)

    def install_sdist(self, sdist: Path, **env: str) -> None:
        """Install a source distribution, built with the setuptools of this environment.

        With build isolation, pip would download setuptools in every run.
        """
        backend = self.folder / "backend"
        backend.mkdir()
        for file in importlib.metadata.files("setuptools") or ():
            top = PurePosixPath(file).parts[0]
            if top != ".." and not (backend / top).exists():
                (backend / top).symlink_to(SITE / top)
        self.install(sdist, "--no-build-isolation", PYTHONPATH=str(backend), **env)
        shutil.rmtree(backend)

    def add_dependencies(self) -> None:
        """Let it find the dependencies that are installed for the tests."""
        (self.site / "dependencies.pth").write_text(f"{SITE}\n", encoding="utf-8")

    def files(self) -> dict[str, bytes]:
        """Return what is installed, by path, without what pip adds itself."""
        added = {
            f"{STEM}.dist-info/{name}" for name in ("INSTALLER", "REQUESTED", "direct_url.json")
        }
        found = {path.relative_to(self.site).as_posix(): path for path in self.site.rglob("*")}
        return {
            name: path.read_bytes()
            for name, path in found.items()
            if path.is_file() and name not in added and path.suffix != ".pyc"
        }


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A new environment."""
    return Environment.new(tmp_path / "environment")


# ── What is in the packages ────────────────────────────────────────────────────────────────────


def test_the_wheel_has_the_source_and_nothing_else(packages: Packages) -> None:
    """Every tracked file of src/, the compiled extensions, the licences; no tests and no junk."""
    expected = packages.sources | COMPILED | METADATA
    assert set(packages.wheel_files) == expected
    assert {PurePosixPath(name).suffix for name in packages.sources} >= KINDS
    assert "ratekeeper/py.typed" in packages.sources


def test_the_source_distribution_has_what_a_build_needs(packages: Packages) -> None:
    """The same files of src/ and the files of the build; not a part of the tests."""
    with tarfile.open(packages.sdist) as archive:
        names = {each.name.removeprefix(f"{STEM}/") for each in archive if each.isfile()}
    egg_info = {name for name in names if name.startswith("src/ratekeeper.egg-info/")}
    assert names - egg_info == SOURCES | WRITTEN | {f"src/{name}" for name in packages.sources}


def test_the_metadata_is_valid(packages: Packages) -> None:
    """The fields follow the specification, and say what a user looks for."""
    files = packages.wheel_files
    metadata = Metadata.from_email(files[f"{STEM}.dist-info/METADATA"], validate=True)
    assert (metadata.name, str(metadata.version)) == ("ratekeeper", ratekeeper.__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE", "licenses/libnghttp2.txt"]
    assert metadata.description_content_type == "text/markdown"
    assert (metadata.description or "").startswith("# Ratekeeper")
    assert not [each for each in metadata.requires_dist or () if each.marker is None]
    tags = files[f"{STEM}.dist-info/WHEEL"].decode()
    assert "Root-Is-Purelib: false" in tags


def unmet(extra: str, requirements: Sequence[Requirement], seen: set[str]) -> Iterator[str]:
    """Yield each requirement of an extra that the installed packages do not meet."""
    seen.add(extra)
    for each in requirements:
        if each.marker is None or not each.marker.evaluate({"extra": extra}):
            continue
        if each.name == "ratekeeper":
            for inner in each.extras - seen:
                yield from unmet(inner, requirements, seen)
            continue
        try:
            found = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"[{extra}] {each}: not installed"
        else:
            if not each.specifier.contains(found, prereleases=True):
                yield f"[{extra}] {each}: {found} is installed"


def test_every_extra_can_be_met_at_once(packages: Packages) -> None:
    """One environment, that of the tests, meets all extras: no two of them exclude each other."""
    fields = packages.wheel_files[f"{STEM}.dist-info/METADATA"]
    metadata = Metadata.from_email(fields, validate=True)
    extras = set(metadata.provides_extra or ())
    assert extras >= {"cli", "client", "django", "fastapi", "flask", "limits", "redis", "server"}
    requirements = metadata.requires_dist or []
    # An extra that names an unknown one of our own would install nothing, with a warning only.
    named = {inner for each in requirements if each.name == "ratekeeper" for inner in each.extras}
    assert named <= extras
    assert not [line for extra in sorted(extras) for line in unmet(extra, requirements, set())]


def test_the_published_wheels_are_those_of_the_supported_versions() -> None:
    """cibuildwheel builds for each Python of the classifiers, and runs a program that exists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheels = project["tool"]["cibuildwheel"]
    (pattern,) = wheels["build"]
    versions = [
        each.removeprefix("Programming Language :: Python :: 3.")
        for each in project["project"]["classifiers"]
        if each.startswith("Programming Language :: Python :: 3.")
    ]
    assert pattern == "cp31{1,2,3}-{many,musl}linux_*"
    assert versions == ["11", "12", "13"]
    assert wheels["test-command"] == f"python {{package}}/{SMOKE_TEST.relative_to(ROOT)}"
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert all(f'"{name}"' in setup for name in wheels["environment"])


# ── In a new environment ───────────────────────────────────────────────────────────────────────


def test_the_wheel_passes_the_smoke_test(packages: Packages, environment: Environment) -> None:
    """Without any dependency: the C kernel decides, and two processes count in one file."""
    environment.install(packages.wheel)
    assert run([environment.python, SMOKE_TEST], environment.folder).endswith(": ok\n")


def test_the_package_installs_by_name(packages: Packages, environment: Environment) -> None:
    """From a folder with both files, pip installs the wheel. Later it adds an extra, without an
    index that has the package: so `pip install 'ratekeeper[jwt]'` in an error message is right.
    """
    environment.pip_install("--find-links", packages.wheel.parent, "ratekeeper")
    where = "import ratekeeper; print(ratekeeper.__file__)"
    installed = Path(run([environment.python, "-c", where], environment.folder).strip())
    assert installed == environment.site / "ratekeeper/__init__.py"
    environment.add_dependencies()
    printed = environment.pip_install("ratekeeper[server]")
    site = environment.site.relative_to(environment.folder)
    assert f"already satisfied: ratekeeper[server] in ./{site}" in printed
    assert "already satisfied: granian" in printed


def test_the_source_distribution_makes_the_same_wheel(
    packages: Packages, environment: Environment
) -> None:
    """pip compiles it and installs the same files as the wheel; it passes the smoke test."""
    environment.install_sdist(packages.sdist, RATEKEEPER_KERNEL="required")
    installed, wheel = environment.files(), packages.wheel_files
    assert set(installed) == set(wheel)
    # The paths of the build are in the compiled files, and their hashes in the RECORD.
    differ = COMPILED | {f"{STEM}.dist-info/RECORD"}
    assert _digests(installed, differ) == _digests(wheel, differ)
    assert run([environment.python, SMOKE_TEST], environment.folder).endswith(": ok\n")


def _digests(files: Mapping[str, bytes], without: set[str]) -> dict[str, str]:
    return {
        name: hashlib.sha256(content).hexdigest()
        for name, content in files.items()
        if name not in without
    }


def test_it_installs_without_a_compiler(packages: Packages, environment: Environment) -> None:
    """As the README promises: then it decides in Python, and `shared://` says what it needs."""
    environment.install_sdist(packages.sdist, CC="/nonexistent/cc")
    assert not [name for name in environment.files() if name.endswith(".so")]
    smoke = [environment.python, SMOKE_TEST, "--pure"]
    assert run(smoke, environment.folder).endswith(": ok\n")


class InstalledService(ServiceProcess):
    """The service of another environment."""

    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self._program = environment.folder / "bin/ratekeeper"

    def command(self) -> list[str]:
        """Return the command line, with the program that pip installed."""
        return [str(self._program), *super().command()[3:]]


def test_the_installed_service_answers(packages: Packages, environment: Environment) -> None:
    """`ratekeeper --version` and `ratekeeper serve` run from the wheel, with the extra `server`."""
    environment.install(packages.wheel)
    environment.add_dependencies()
    program = environment.folder / "bin/ratekeeper"
    assert (
        run([program, "--version"], environment.folder) == f"ratekeeper {ratekeeper.__version__}\n"
    )
    where = "import ratekeeper.service.grpc._http2 as built; print(built.__file__)"
    installed = run([environment.python, "-c", where], environment.folder)
    assert Path(installed.strip()).is_relative_to(environment.site)
    with InstalledService(environment) as service:
        answer = service.ask("POST", "/v1/check", {"user": "42"})
        assert (answer.status, answer.data["rule"], answer.data["remaining"]) == (200, "users", 99)
        # The templates and the vendored scripts of the console are installed, too.
        assert service.ask("GET", "/console/login").status == 200
        assert service.ask("GET", "/docs").status == 200


def test_type_checkers_understand_the_installed_package(
    packages: Packages, environment: Environment
) -> None:
    """mypy --strict accepts the typed uses of all public names, as in a user's own project."""
    environment.install(packages.wheel)
    environment.add_dependencies()
    project = environment.folder / "project"
    project.mkdir()
    shutil.copy(TYPED_USES, project)
    checker = [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment.python]
    # Without a configuration: the settings of this repository would find the package in src/.
    found = run([*checker, "--config-file=", TYPED_USES.name], project)
    assert found == "Success: no issues found in 1 source file\n"
