"""The storage and strategy tests of `limits`' own source distribution, run on our storages.

pip downloads the archive of the installed version (`tools/limits_sdist.py`). It is unpacked in a
temporary folder, and pytest runs there with `limits_plugin.py`, which injects our storages and a
clock that a sleep advances.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from tools.limits_sdist import limits_sdist

from tests.redis_servers import running

HERE = Path(__file__).parent
# All that are parametrised by storages.
FILES = (
    "tests/test_storage.py",
    "tests/test_strategy.py",
    "tests/aio/test_storage.py",
    "tests/aio/test_strategy.py",
    "tests/integration/test_concurrency.py",
)
# Every other file of the distribution that has tests, and why it is not run.
LEFT_OUT = {
    "tests/test_limit_granularities.py": "tests no storage",
    "tests/test_limits.py": "tests no storage",
    "tests/test_ratelimit_parser.py": "tests no storage",
    "tests/test_storage_schema.py": "parses URIs of servers with redis-py and pymemcache",
    "tests/test_utils.py": "tests no storage",
    "tests/storage/test_memory.py": "pickles a MemoryStorage; a file or a server cannot be pickled",
    "tests/storage/test_redis.py": "reads the keys that the Redis storage of limits writes",
    "tests/aio/storage/test_memory.py": "as tests/storage/test_memory.py",
    "tests/aio/storage/test_redis.py": "as tests/storage/test_redis.py",
    "tests/benchmarks/test_storage.py": "benchmarks; ours are in bench/",
}
# Tests that fail with our storages, and why: {"path::Class::test[storage]": "reason"}.
EXCEPTIONS: dict[str, str] = {}
# Of each storage: 31 tests of threads and 32 of asyncio.
TESTS_MIN = 60


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("limits")
    with tarfile.open(limits_sdist()) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"limits-{version('limits')}"


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index, the message names the file to save; a saved file needs no index."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    archive = tmp_path / "limits-sdist" / f"limits-{version('limits')}.tar.gz"
    with pytest.raises(RuntimeError, match=re.escape(f"or save it as {archive}")):
        limits_sdist()
    archive.parent.mkdir(exist_ok=True)
    archive.touch()
    assert limits_sdist() == archive


def test_every_file_of_tests_is_run_or_left_out_for_a_reason(distribution: Path) -> None:
    """A new version of `limits` with another file of tests fails here."""
    found = {str(path.relative_to(distribution)) for path in distribution.rglob("test_*.py")}
    assert found == {*FILES, *LEFT_OUT}


def test_the_tests_of_limits_pass_on_our_storages(distribution: Path, tmp_path: Path) -> None:
    """All tests pass but the listed exceptions, which fail; on memory, a file and two Redis."""
    storages = {"memory": "ratekeeper+memory://", "shared": f"ratekeeper+shared://{tmp_path}/file"}
    storages |= {
        f"redis-{kind}": f"ratekeeper+{running(kind).uri}" for kind in ("single", "cluster")
    }
    outcomes_file = tmp_path / "outcomes.json"
    # Their configuration and conftest.py are for servers in containers.
    command = [sys.executable, "-m", "pytest", "--quiet", "-c", os.devnull, "--noconftest"]
    command += ["--rootdir", str(distribution), "-p", "limits_plugin", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *FILES],
        cwd=distribution,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(distribution), str(HERE))),
            "LIMITS_STORAGES": json.dumps(storages),
            "LIMITS_OUTCOMES": str(outcomes_file),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = ran.stdout + ran.stderr
    assert outcomes_file.exists(), output
    outcomes: dict[str, str] = json.loads(outcomes_file.read_text())
    failed = {name for name, outcome in outcomes.items() if outcome != "passed"}
    assert failed == EXCEPTIONS.keys(), output
    by_storage = Counter(
        name.rpartition("[")[2].rstrip("]") for name, outcome in outcomes.items() if name[-1] == "]"
    )
    assert {name for name, count in by_storage.items() if count >= TESTS_MIN} == set(storages)
