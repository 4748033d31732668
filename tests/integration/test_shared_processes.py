"""shared:// across processes: they admit exactly the limit, even if workers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ratekeeper import Limit, StoreTimeout
from ratekeeper.core.model import UNIT_ALGORITHMS
from ratekeeper.decide.store import LocalCounter
from ratekeeper.decide.stores import open_local_store
from tests.integration.hammer import TOGETHER_MAX
from tests.integration.program import printed
from tests.redis_servers.waiting import await_stopped

PROCESSES = 4
# Kills per algorithm, one every 10 ms. The seed is printed when a test fails.
KILLS = 60


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_processes_on_one_key_admit_exactly_the_limit(algorithm: str, tmp_path: Path) -> None:
    """Four processes that check one key are admitted exactly the limit together."""
    result = printed("hammer", "exact", tmp_path / "one.limits", algorithm, PROCESSES, 1, 100_000)
    assert result == {"admitted": 100_000, "statuses": [0] * PROCESSES}


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_processes_on_many_keys_admit_exactly_the_limit(algorithm: str, tmp_path: Path) -> None:
    """Four processes that check 200 keys are admitted exactly the limit of each key together."""
    result = printed("hammer", "exact", tmp_path / "many.limits", algorithm, PROCESSES, 200, 100)
    assert result == {"admitted": 200 * 100, "statuses": [0] * PROCESSES}


def test_files_may_be_opened_and_closed_at_any_time(tmp_path: Path) -> None:
    """Four processes that open and close the file every few checks admit exactly the limit."""
    result = printed(
        "hammer", "reopening", tmp_path / "new.limits", "sliding_window_log", PROCESSES, 20, 100
    )
    assert result == {"admitted": 20 * 100, "statuses": [0] * PROCESSES}


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
def test_killed_workers_block_no_other_and_lose_no_count(algorithm: str, tmp_path: Path) -> None:
    """Killed workers block no other worker, and each loses at most the one check that was in
    flight."""
    seed = int.from_bytes(os.urandom(4))
    keys, limit = 3, 50_000
    result = printed(
        "hammer",
        "killed",
        tmp_path / "killed.limits",
        *(algorithm, PROCESSES, keys, limit, KILLS, seed),
    )
    charged = keys * limit - result["left"]
    in_flight = charged - result["admitted"]
    assert 0 <= in_flight <= result["kills"], f"seed {seed}: {result}"
    assert result["kills"] > KILLS, f"seed {seed}: {result}: too few kills to test anything"


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
@pytest.mark.parametrize("kills", [0, KILLS])
def test_keys_checked_together_are_charged_together(
    algorithm: str, kills: int, tmp_path: Path
) -> None:
    """Processes that check overlapping sets of keys, in different orders, wait for no dead lock.

    Every key is charged the units of the admitted calls, and no more than its limit. A killed
    process may have charged a part of the one call that was in flight.
    """
    seed = int.from_bytes(os.urandom(4))
    keys, limit = 24, 2_000
    result = printed(
        "hammer",
        "together",
        tmp_path / "together.limits",
        *(algorithm, PROCESSES, keys, limit, kills, seed),
    )
    charged = keys * limit - sum(result["left"])
    in_flight = charged - result["admitted"]
    assert 0 <= in_flight <= kills * TOGETHER_MAX, f"seed {seed}: {result}"
    assert min(result["left"]) == 0, f"seed {seed}: {result}"
    assert result["statuses"] == [0] * PROCESSES, f"seed {seed}: {result}"


CHECKS_ONE_KEY = """
import sys
from ratekeeper import Limiter
check = Limiter("1000000000/second", name="hot", store=sys.argv[1]).check
print("ready", flush=True)
while True:
    check("key")
"""


def test_a_stopped_process_keeps_other_keys_from_being_charged_only_if_they_need_its_key(
    tmp_path: Path,
) -> None:
    """The check of its key times out. The other one is charged only if that one is optional."""
    uri = f"shared://{tmp_path}/stopped.limits?capacity=30000"
    store = open_local_store(uri)
    hot = store.counter([Limit(10**9, per=1)], "hot")
    cold = store.counter([Limit(100, per=86_400)], "cold")
    command = [sys.executable, "-c", CHECKS_ONE_KEY, uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            for _ in range(1_000):  # until it stops within a check
                process.send_signal(signal.SIGSTOP)
                await_stopped(process.pid)
                try:
                    hot.peek("key", 0)
                except StoreTimeout:
                    break
                process.send_signal(signal.SIGCONT)
            name = next(name for name in "abc" if _is_free(cold, name))
            checks = [(hot, "key", 1), (cold, name, 7)]
            for optional, spent in (((), 0), ({1}, 0), ({0}, 7)):
                failed, other = store.check_together(checks, optional)
                assert isinstance(failed, StoreTimeout)
                assert other
                assert cold.peek(name, 0).remaining == 100 - spent
        finally:
            process.kill()
    assert all(store.check_together(checks))
    store.close()


def _is_free(counter: LocalCounter, name: str) -> bool:
    """Return False if the key is in the segment that the stopped process has locked."""
    try:
        return bool(counter.peek(name, 0))
    except StoreTimeout:
        return False
