"""The file of a shared:// store is truncated, removed, replaced or overwritten while in use."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import Limiter, StoreUnavailable
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess

OPTIONS = "capacity=5000&log_bytes=65536"
SECONDS_MAX = 60

# Checks keys until the store has failed and works again. Then it spends three units of "shared".
WORKER = """
import json, sys, threading, time
from ratekeeper import Limit, Limiter, StoreError, StoreUnavailable
limits = [Limit(1000, per=3600), Limit(5, per=3600, name="log", algorithm="sliding_window_log")]
limiter = Limiter(limits[:1], store=sys.argv[1], on_failure="raise")
logs = Limiter(limits[1:], store=limiter.store, on_failure="raise")
exec(sys.argv[2])
losses, deadline_s = [], time.monotonic() + 50

def work():
    while time.monotonic() < deadline_s:
        try:
            for number in range(300):
                limiter.check(f"key-{number}")
                logs.check(f"key-{number}")
            if losses:
                return
        except StoreUnavailable as error:
            losses.append(str(error))
        except StoreError:
            pass  # until the loss is noticed, random bytes may look like a full or locked table

threads = [threading.Thread(target=work) for _ in range(int(sys.argv[3]))]
for thread in threads:
    thread.start()
print("ready", flush=True)
for thread in threads:
    thread.join()
left = [limiter.check("shared").remaining for _ in range(3)]
print(json.dumps({"losses": losses, "left": left}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api.limits"


@contextmanager
def worker(path: Path, setup: str = "", threads: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Start a process that uses the store, and wait until it does."""
    command = [sys.executable, "-c", WORKER, f"shared://{path}?{OPTIONS}", setup, str(threads)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the result of a worker, which must not crash."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        pytest.fail(f"exit status {process.wait(SECONDS_MAX)}: {process.stderr.read()}")
    result: dict[str, Any] = json.loads(line)
    return result


def truncate(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def truncate_and_extend(path: Path) -> None:
    """Keep the file open: as soon as it is truncated, the worker may remove it."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.truncate(size // 2)
        file.truncate(size)


def replace_by_a_new_store(path: Path) -> None:
    other = path.with_name("other.limits")
    Limiter("5/m", store=f"shared://{other}?{OPTIONS}").close()
    other.rename(path)


def copy_a_store_over_it(path: Path) -> None:
    other = path.with_name("other.limits")
    Limiter("5/m", store=f"shared://{other}?{OPTIONS}").close()
    shutil.copyfile(other, path)


def overwrite_with_noise(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


DAMAGES = {
    "emptied": (truncate(0), "was truncated"),
    "one page left": (truncate(4_096), "was truncated"),
    "half left": (truncate(100_000), "was truncated"),
    "truncated and extended": (truncate_and_extend, r"was (truncated|overwritten)"),
    "removed": (Path.unlink, "was removed"),
    "replaced": (replace_by_a_new_store, r"was (replaced|removed)"),
    "copied over": (copy_a_store_over_it, r"was (truncated|overwritten)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_lost_file_is_unavailable_and_then_opened_again(path: Path, damage: str) -> None:
    """The process gets StoreUnavailable and no signal, and then counts in the same file as new
    processes."""
    spoil, message = DAMAGES[damage]
    with worker(path) as process:
        spoil(path)
        result = result_of(process)
        assert result["left"] == [999, 998, 997]
        for loss in result["losses"]:
            with pytest.raises(StoreUnavailable, match=f"api.limits {message}.*while it was in"):
                raise StoreUnavailable(loss)
        with Limiter("1000/hour", store=f"shared://{path}?{OPTIONS}") as here:
            assert here.check("shared").remaining == 996


def test_noise_over_the_whole_file_crashes_no_process(path: Path) -> None:
    """A file that another program filled with random bytes is not ours any more. It is rejected
    and not changed, until the operator removes it."""
    with worker(path) as process:
        overwrite_with_noise(path)
        noise = path.read_bytes()
        with pytest.raises(StoreUnavailable, match="is not a Ratekeeper file and was not changed"):
            Limiter("1000/hour", store=f"shared://{path}?{OPTIONS}")
        assert len(path.read_bytes()) == len(noise)
        path.unlink()
        result = result_of(process)
        assert result["left"] == [999, 998, 997]


def test_threads_survive_a_truncated_file(path: Path) -> None:
    """Four threads that check at once all go on."""
    with worker(path, threads=4) as process:
        os.truncate(path, 0)
        assert result_of(process)["left"] == [999, 998, 997]


def test_a_forked_child_survives_a_file_that_was_truncated_before_the_fork(path: Path) -> None:
    """The child inherits the loss, or notices it, and opens the file again itself."""
    setup = "import os\nos.truncate(sys.argv[1][9:].partition('?')[0], 0)\nos.fork()"
    with worker(path, setup) as process:
        assert result_of(process)["losses"]


FAULTHANDLER = "import faulthandler; faulthandler.enable()"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_faulthandler_may_be_enabled_before_and_after(path: Path, late: bool) -> None:
    """The store survives in both orders."""
    setup = FAULTHANDLER if late else f"limiter.close(); {FAULTHANDLER}; {REOPEN}"
    with worker(path, setup) as process:
        os.truncate(path, 0)
        assert result_of(process)["left"] == [999, 998, 997]


REOPEN = """limiter = Limiter(limits[:1], store=sys.argv[1], on_failure="raise")
logs = Limiter(limits[1:], store=limiter.store, on_failure="raise")"""

# A bus error in memory that is not ours.
FOREIGN = """
import mmap, os, sys, tempfile
from ratekeeper import Limiter
exec(sys.argv[2])
limiter = Limiter("5/hour", store=sys.argv[1])
limiter.check("me")
exec(sys.argv[3])
with tempfile.TemporaryFile() as file:
    file.truncate(8192)
    mapped = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    mapped[5000]
"""


@pytest.mark.parametrize("early", ["", FAULTHANDLER])
@pytest.mark.parametrize("late", ["", FAULTHANDLER])
def test_a_bus_error_in_other_memory_is_not_ours(path: Path, early: str, late: str) -> None:
    """It ends the process as ever, after the handler that the application installed."""
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, f"shared://{path}?{OPTIONS}", early, late],
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in done.stderr) is bool(early or late)


def test_a_sent_signal_reaches_the_application(path: Path) -> None:
    """SIGBUS from another process goes to the application's handler, or ends the process."""
    script = (
        "import os, signal, sys\n"
        "from ratekeeper import Limiter\n"
        "if sys.argv[2]: signal.signal(signal.SIGBUS, lambda *_: print('handled'))\n"
        "limiter = Limiter('5/hour', store=sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGBUS)\n"
    )
    for handled, status in (("yes", 0), ("", -signal.SIGBUS)):
        command = [sys.executable, "-c", script, f"shared://{path}?{OPTIONS}", handled]
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, timeout=SECONDS_MAX
        )
        assert done.returncode == status, done.stderr
        assert done.stdout == ("handled\n" if handled else "")


def test_a_file_that_was_moved_away_is_still_one_file(path: Path, tmp_path: Path) -> None:
    """Its processes go on together. They notice as soon as there is a new file at the path."""
    uri = f"shared://{path}?{OPTIONS}"
    with Limiter("5/hour", store=uri, on_failure="raise") as old:
        old.check("me")
        path.rename(tmp_path / "elsewhere")
        assert old.check("me").remaining == 3
        with Limiter("5/hour", store=uri) as new:
            assert new.check("me").remaining == 4
            message = wait_for_loss(old)
            assert "was replaced by another file while it was in use" in message
            assert old.check("me").remaining == 3
            assert new.check("me").remaining == 2


def wait_for_loss(limiter: Limiter) -> str:
    """Check until the store raises StoreUnavailable; return its message."""
    for _ in range(10_000_000):
        try:
            limiter.check("other", 0)
        except StoreUnavailable as error:
            return str(error)
    raise AssertionError


def test_a_loss_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says what happened, to which file, and what became of the quotas."""
    with Limiter("5/hour", store=f"shared://{path}?{OPTIONS}", on_failure="raise") as limiter:
        path.unlink()
        wait_for_loss(limiter)
        assert limiter.check("me").remaining == 4
    (record,) = (each for each in caplog.records if each.name == "ratekeeper")
    assert record.levelname == "ERROR"
    assert record.getMessage() == (
        f"{path} was removed while it was in use; it was opened again, and the quotas in the lost "
        f"file are forgotten"
    )


def test_a_file_that_cannot_be_opened_again_stays_unavailable(path: Path) -> None:
    """The message says what was lost and why it cannot be opened. It works again once it can."""
    with Limiter("5/hour", store=f"shared://{path}?{OPTIONS}", on_failure="raise") as limiter:
        path.unlink()
        path.mkdir()
        message = wait_for_loss(limiter)
        assert "was replaced by another file" in message
        assert "cannot be opened again" in message
        assert "Is a directory" in message
        with pytest.raises(StoreUnavailable):
            limiter.stats()


def test_the_failure_policy_answers_while_the_file_is_lost(path: Path) -> None:
    """A fail-closed limiter denies; its decisions are degraded."""
    with Limiter("5/hour", store=f"shared://{path}?{OPTIONS}", on_failure="closed") as limiter:
        path.unlink()
        path.mkdir()
        while not (decision := limiter.check("me", 0)).degraded:
            pass
        assert not decision.allowed


def test_a_service_whose_file_is_damaged_goes_on_by_itself() -> None:
    """The workers live, say what happened, and count together in a new file. A service that finds
    a damaged file at startup replaces it."""

    def remaining() -> int | None:
        left: int | None = service.ask("POST", "/v1/check", {"user": "me"}).data["remaining"]
        return left

    def messages() -> str:
        return "\n".join(str(event["message"]) for event in service.events())

    with ServiceProcess(workers=2) as service:
        assert remaining() == 99
        workers = service.worker_pids()
        limits = service.data / "limits"
        os.truncate(limits, 5_000)
        until(lambda: (remaining(), messages().count("opened again") == 2)[1], "two workers", 30)
        left = remaining()
        assert left
        assert [remaining() for _ in range(3)] == [left - 1, left - 2, left - 3]
        assert service.worker_pids() == workers
        assert "was truncated, or its disk failed, while it was in use" in messages()
        service.end()
        os.truncate(limits, 5_000)
        service.start()
        assert remaining() == 99
        assert "had 5000 bytes instead of" in messages()


def test_a_lost_file_is_in_the_statistics(path: Path) -> None:
    """The time at which this process found it lost; metrics report it."""
    with Limiter("5/hour", store=f"shared://{path}?{OPTIONS}", on_failure="raise") as limiter:
        assert limiter.stats().lost_s == 0.0
        path.unlink()

        def found() -> bool:
            with suppress(StoreUnavailable):
                limiter.check("k")
            return bool(limiter.stats().lost_s)

        until(found, "the loss is noticed", SECONDS_MAX)
