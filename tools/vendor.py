"""Build the vendored files of the console: libraries for browsers, as files in the package.

    python3 tools/vendor.py            # fetch the packages, build the files, write them
    python3 tools/vendor.py --check    # do the same in a temporary folder and compare

`vendor.json` pins the exact version of each package and the SHA-512 of its archive, and records the
SHA-256 of each file that results. An archive that differs from its pin is rejected. To update a
package, change its version and set its integrity to "". The next run records the integrity of the
archive that it fetches; review that change like any other. A package that the bundle needs and that
has no pin is an error of the bundler, which names it.

`npm` fetches the archives. `npm` runs no code of a package here. The bundler is the program in the
package `@esbuild/linux-x64`, so building needs Linux on x86-64. Users of Ratekeeper build nothing.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

TOOLS: Final = Path(__file__).resolve().parent
ROOT: Final = TOOLS.parent
PINS: Final = TOOLS / "vendor.json"
CONSOLE: Final = "src/ratekeeper/service/console/static/vendor"
TESTS: Final = "tests/console/vendor"

# The file that results, and the package and file that it is copied from.
COPIED: Final = {
    f"{CONSOLE}/htmx.js": ("htmx.org", "dist/htmx.min.js"),
    f"{CONSOLE}/uplot.css": ("uplot", "dist/uPlot.min.css"),
    f"{CONSOLE}/swagger-ui.js": ("swagger-ui-dist", "swagger-ui-bundle.js"),
    f"{CONSOLE}/swagger-ui.css": ("swagger-ui-dist", "swagger-ui.css"),
    f"{TESTS}/axe.js": ("axe-core", "axe.min.js"),
}
# The ES module that results, and the source that is bundled into it.
BUNDLED: Final = {
    f"{CONSOLE}/uplot.js": "node_modules/uplot/dist/uPlot.esm.js",
    f"{CONSOLE}/codemirror.js": "codemirror_entry.js",
}
BUNDLER: Final = "@esbuild/linux-x64"
LICENCE: Final = re.compile(r"(?:licen[cs]e|notice|copying)\b.*|.*\.licen[cs]e\.txt", re.IGNORECASE)
# A built file names a source map, which is not shipped; a browser would ask for it.
SOURCE_MAP: Final = re.compile(rb"\n?(?://|/\*)# sourceMappingURL=[^\n]*\n?\Z")
SECONDS_MAX: Final = 300

Pins = dict[str, Any]


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description="Build the vendored files of the console.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check: bool = parser.parse_args().check
    pins: Pins = json.loads(PINS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        modules = Path(folder, "node_modules")
        for name, archive in fetched(pins["packages"], Path(folder)).items():
            integrity = integrity_of(archive)
            if not check:
                pins["packages"][name]["integrity"] = (
                    pins["packages"][name]["integrity"] or integrity
                )
            if pins["packages"][name]["integrity"] != integrity:
                sys.exit(f"{name}: the archive has the integrity {integrity}, which is not its pin")
            unpack(archive, modules / name)
        files = built(Path(folder))
    pins["files"] = {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}
    if check:
        compare(files, pins)
    else:
        write(files, pins)


def fetched(packages: Pins, folder: Path) -> dict[str, Path]:
    """Fetch the archive of each package, and return where they are."""
    wanted = [f"{name}@{pin['version']}" for name, pin in packages.items()]
    answer = subprocess.run(
        ["npm", "pack", "--json", "--ignore-scripts", "--pack-destination", folder, *wanted],
        check=True,
        stdout=subprocess.PIPE,
        timeout=SECONDS_MAX,
    )
    return {each["name"]: folder / each["filename"] for each in json.loads(answer.stdout)}


def integrity_of(archive: Path) -> str:
    """Return the SHA-512 of a file, in the form of package locks."""
    return "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the archive of a package. Its files are in one folder with any name."""
    with tarfile.open(archive) as opened:
        for member in opened:
            _, _, member.name = member.name.partition("/")
            if member.isfile() and member.name:
                opened.extract(member, folder, filter="data")


def built(folder: Path) -> dict[str, bytes]:
    """Return the content of each vendored file, by its path in the tree."""
    modules = folder / "node_modules"
    files: dict[str, bytes] = {}
    packages: dict[str, set[str]] = {}
    for path, (name, source) in COPIED.items():
        files[path] = SOURCE_MAP.sub(b"\n", modules.joinpath(name, source).read_bytes())
        packages.setdefault(str(Path(path).parent), set()).add(name)
    (folder / "codemirror_entry.js").write_bytes((TOOLS / "codemirror_entry.js").read_bytes())
    for path, source in BUNDLED.items():
        files[path], found = bundled(folder, source)
        packages.setdefault(str(Path(path).parent), set()).update(found)
    for parent, names in packages.items():
        for name in sorted(names):
            path = f"{parent}/LICENSES/{name.removeprefix('@').replace('/', '-')}.txt"
            files[path] = licences(modules / name)
    return files


def bundled(folder: Path, source: str) -> tuple[bytes, set[str]]:
    """Return a minified ES module of a source, and the packages that are in it."""
    program = folder / "node_modules" / BUNDLER / "bin/esbuild"
    program.chmod(0o755)
    options = "--bundle --minify --format=esm --target=es2020 --legal-comments=none --charset=utf8"
    options += " --log-level=warning"
    subprocess.run(
        [program, source, *options.split(), "--outfile=out.js", "--metafile=out.json"],
        cwd=folder,
        check=True,
        timeout=SECONDS_MAX,
    )
    inputs = json.loads((folder / "out.json").read_text())["inputs"]
    found = (re.match(r"node_modules/((?:@[^/]+/)?[^/]+)/", name) for name in inputs)
    return (folder / "out.js").read_bytes(), {match[1] for match in found if match}


def licences(package: Path) -> bytes:
    """Return the texts of a package's licence files, with the package's name and version."""
    about = json.loads((package / "package.json").read_text())
    title = f"{about['name']} {about['version']} ({about['license']})\n"
    texts = [
        f"\n---- {path.name} ----\n\n{path.read_text().strip()}\n"
        for path in sorted(package.iterdir())
        # The notices of other builds of the same package are not ours.
        if LICENCE.fullmatch(path.name) and not re.search("es-bundle|standalone", path.name)
    ]
    if not texts:
        sys.exit(f"{about['name']}: the package has no licence file")
    lines = "".join([title, *texts]).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines).encode()


def compare(files: dict[str, bytes], pins: Pins) -> None:
    """Exit with an error if the tree has other files than were built."""
    recorded = json.loads(PINS.read_text())["files"]
    wrong = [
        name
        for name, content in files.items()
        if not (ROOT / name).is_file() or (ROOT / name).read_bytes() != content
    ]
    if wrong or recorded != pins["files"]:
        sys.exit(f"these files differ from what was built: {', '.join(wrong) or PINS.name}")
    print(f"{len(files)} files are as built")


def write(files: dict[str, bytes], pins: Pins) -> None:
    """Replace the vendored files and the record of their checksums."""
    for folder in (CONSOLE, TESTS):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.relative_to(ROOT).as_posix() not in files:
                path.unlink()
    for name, content in files.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_bytes(content)
    PINS.write_text(json.dumps(pins, indent=2) + "\n")
    print(f"{len(files)} files written")


if __name__ == "__main__":
    main()
