"""Plants one defect after the other, and reports those that no test notices.

    python -m tests.mutants                     the planted defects
    python -m tests.mutants core web/retry-after-0  those of a folder, and one by name
    python -m tests.mutants --random 200        the planted ones and 200 random ones

A test suite that lets a defect pass is not a net. `planted.py` says what a planted defect is, and
`sampled.py` what a random one is. The exit code is 1 if a planted one survives, which means that a
test is missing. Random ones may survive: some change nothing that a user can notice.

Each defect is planted in a copy of the repository, never in the repository itself. There, the
kernel is built if a file in C changed, and pytest runs the tests of the defect until one fails. In
the end, the tests that failed run once more without a defect: one that still fails proves nothing.
Two copies work at the same time. If pytest takes longer than LIMIT_S, the defect counts as noticed,
and all processes that pytest started are killed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Final

from tests.mutants.planted import ROOT, Mutant, planted
from tests.mutants.sampled import sampled

COPIES: Final = 2
LIMIT_S: Final = 300
CONFIRM_LIMIT_S: Final = 1_800
FAILS_ANYWAY: Final = "the test fails without it"
_IGNORED: Final = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info")
_PYTEST: Final = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    *("--hypothesis-profile=mutants", "--tb=no", "-rfE"),
)
# A line of pytest's summary, up to the values of a parametrised test, which may be any text.
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+)", re.MULTILINE)


class Copies:
    """Two copies of the repository, and the processes that run in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: Queue[Path] = Queue()
        self._running: set[int] = set()
        self._planted = 0
        # By the name of the defect.
        self._failed: dict[str, set[str]] = {}
        self.deadline_s = 0.0

    def prepare(self, tests: Sequence[str]) -> str:
        """Copy the repository and import the tests there; return the output if that fails."""
        first = self._folder / "1"
        shutil.copytree(ROOT, first, ignore=_IGNORED)
        code, output = self._run(first, [*_PYTEST, "--collect-only", *tests], LIMIT_S)
        for number in range(1, COPIES + 1):
            copy = self._folder / str(number)
            if number > 1:
                shutil.copytree(first, copy)  # with the bytecode that the import made
            self._free.put(copy)
        return "" if code == 0 else output or f"importing the tests took longer than {LIMIT_S} s"

    def confirm(self) -> set[str]:
        """Run the tests that failed once more; return the defects that only failing tests saw."""
        names = sorted(set().union(*self._failed.values()))
        if not names:
            return set()
        copy = self._free.get()
        workers = ("--numprocesses", str(COPIES), "--dist=worksteal")
        code, output = self._run(copy, [*_PYTEST, *workers, *names], CONFIRM_LIMIT_S)
        still = set(names) if code is None else set(_FAILED.findall(output))
        return {name for name, failed in self._failed.items() if failed and failed <= still}

    def verdict(self, mutant: Mutant) -> str:
        """Plant a defect, run its tests and remove it again; return how that ended."""
        if time.monotonic() > self.deadline_s:
            return "not run"
        copy = self._free.get()
        path = copy / mutant.path.relative_to(ROOT)
        library = next(iter(path.parent.glob("_kernel*.so")), path)
        saved = {each: (each.read_bytes(), each.stat()) for each in (path, library)}
        try:
            path.write_text(mutant.text)
            # Python compares times in whole seconds, and the compiler's rule those of both files.
            self._planted += 1
            later_s = time.time() + 10 * self._planted
            os.utime(path, (later_s, later_s))
            if path.suffix == ".c":
                build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
                if self._run(copy, build, LIMIT_S)[0] != 0:
                    return "does not compile"
            code, output = self._run(copy, [*_PYTEST, "-x", *mutant.tests], LIMIT_S)
            self._failed[mutant.name] = set(_FAILED.findall(output))
        finally:
            for each, (content, stat) in saved.items():
                each.unlink()  # a process may still have it mapped
                each.write_bytes(content)
                os.utime(each, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            self._free.put(copy)
        return "survived" if code == 0 else "killed" if code is not None else "killed by time"

    def stop(self) -> None:
        """Kill all processes, and plant no further defect."""
        self.deadline_s = 0.0
        for group in tuple(self._running):
            _kill(group)

    def _run(self, copy: Path, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Run a command in a copy; return its exit code, None after the limit, and its output."""
        scratch = copy.with_name(f"t{copy.name}")
        scratch.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy / "src"),
            "TMPDIR": str(scratch),
            "RATEKEEPER_KERNEL": "required",
        }
        with (scratch / "output").open("w+") as output:  # not a pipe: a child may keep it open
            process = subprocess.Popen(
                command,
                cwd=copy,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._running.add(process.pid)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process.pid)
                process.wait()
                self._running.discard(process.pid)
                shutil.rmtree(scratch, ignore_errors=True)
            output.seek(0)
            return code, output.read()


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> int:
    """Run the chosen defects, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", help="only those with such a name, or in such a folder")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random ones as well")
    parser.add_argument("--minutes", type=float, default=60, help="begin no defect after this time")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [(each, True) for each in planted()] + [
        (each, False) for each in (sampled(given.random) if given.random else ())
    ]
    chosen = [
        (each, must)
        for each, must in chosen
        if not given.names or any(name in {each.area, each.name} for name in given.names)
    ]
    if not chosen:
        parser.error("no defect has such a name")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # PostgreSQL, if root runs the tests, is another user
        copies = Copies(Path(folder))
        copies.deadline_s = began_s + given.minutes * 60
        with ThreadPoolExecutor(COPIES) as pool:
            try:
                tests = sorted({name for each, _ in chosen for name in each.tests})
                if failure := copies.prepare(tests):
                    print(f"{failure}\nthe tests cannot be imported, without any defect")
                    return 2
                verdicts = _all(pool, copies, [each for each, _ in chosen], began_s)
                failing = copies.confirm()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                copies.stop()
                raise
    verdicts = [
        FAILS_ANYWAY if each.name in failing else verdict
        for (each, _), verdict in zip(chosen, verdicts, strict=True)
    ]
    return _report(chosen, verdicts, time.monotonic() - began_s)


def _all(
    pool: ThreadPoolExecutor, copies: Copies, mutants: Sequence[Mutant], began_s: float
) -> list[str]:
    found = []
    for mutant, verdict in zip(mutants, pool.map(copies.verdict, mutants), strict=True):
        found.append(verdict)
        taken_s = time.monotonic() - began_s
        print(f"{taken_s:5.0f} s  {verdict:14}  {mutant.name}: {mutant.breaks}", flush=True)
    return found


def _report(chosen: Sequence[tuple[Mutant, bool]], verdicts: Sequence[str], taken_s: float) -> int:
    missed = [
        (each, must, verdict)
        for (each, must), verdict in zip(chosen, verdicts, strict=True)
        if not verdict.startswith("killed")
    ]
    for title, wanted in (("planted", True), ("random", False)):
        total = Counter(each.area for each, must in chosen if must is wanted)
        left = Counter(each.area for each, must, _ in missed if must is wanted)
        if total:
            print(f"\n{title:12} {'killed':>7} {'not killed':>11}")
        for area, count in [*total.items(), ("all", total.total())] if total else ():
            lost = left.total() if area == "all" else left[area]
            print(f"{area:12} {count - lost:7} {lost:11}")
    for each, _, verdict in missed:
        print(f"{verdict}: {each.name}: {each.breaks}")
    print(f"{len(chosen)} defects in {taken_s:.0f} s")
    return int(any(must for _, must, _ in missed))


if __name__ == "__main__":
    sys.exit(main())
