"""Check an installed Ratekeeper in seconds, without its dependencies: smoke_test.py [--pure].

It limits a key in this process, and counts in one file from two processes. Without an option it
fails if the C kernel is missing. With `--pure` it fails if the kernel is there.
`tests/test_packages.py` and cibuildwheel (pyproject.toml) run it in a new environment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from ratekeeper import Limiter, StoreUnavailable, __version__
from ratekeeper.decide.kernel import BUILT

BUILT_IN = sys.modules["ratekeeper"].__file__ or ""
CHECKS = 60
LIMIT = "100/hour"
CHILD = """
import sys
from ratekeeper import Limiter
with Limiter(sys.argv[1], store=sys.argv[2], name="smoke") as limiter:
    print(sum(limiter.check("k").allowed for _ in range(int(sys.argv[3]))))
"""


def in_another_process(store: str) -> int:
    """Return how many of CHECKS checks a second process was allowed."""
    command = [sys.executable, "-c", CHILD, LIMIT, store, str(CHECKS)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def shared_count() -> tuple[int, int]:
    """Return how many of CHECKS checks each of two processes was allowed, on one file."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"shared://{Path(folder, 'limits')}?capacity=1000"
        with Limiter(LIMIT, store=store, name="smoke") as limiter:
            here = sum(limiter.check("k").allowed for _ in range(CHECKS))
            return here, in_another_process(store)


def main(arguments: list[str]) -> None:
    """Run all checks; an AssertionError names the first that failed."""
    pure = arguments == ["--pure"]
    assert pure or not arguments, f"unknown arguments {arguments}; the only option is --pure"
    source = Path(__file__).parents[1] / "src"
    assert source not in Path(BUILT_IN).parents, f"{source} is imported; install the package first"
    assert version("ratekeeper") == __version__
    assert BUILT is not pure, f"the C kernel is {'there' if BUILT else 'missing'}"
    decisions = [Limiter("100/minute").check("user:42"), Limiter("1/minute").check("k")]
    assert all(decision.allowed for decision in decisions), decisions
    with Limiter("2/minute") as limiter:
        assert [limiter.check("k").allowed for _ in range(3)] == [True, True, False]
    if pure:
        try:
            shared_count()
        except StoreUnavailable:
            pass
        else:
            raise AssertionError("shared:// works without the kernel")
    else:
        assert shared_count() == (CHECKS, 100 - CHECKS)
    print(f"ratekeeper {__version__} on Python {sys.version.split()[0]}: ok")


if __name__ == "__main__":
    main(sys.argv[1:])
