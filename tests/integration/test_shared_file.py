"""The file of a shared:// store: creation, restarts, permissions, damage, and a full disk."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from random import Random

import pytest

from ratekeeper import ConfigError, Limit, Limiter, StoreFull, StoreUnavailable
from ratekeeper.core.model import UNIT_ALGORITHMS, UNITS_MAX
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores import open_store

VERSION_AT = 8
CAPACITY_AT = 24
SMALL = "capacity=100&log_bytes=65536"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api.limits"


def limiter(path: Path, options: str = SMALL, limits: str = "5/hour") -> Limiter:
    return Limiter(limits, store=f"shared://{path}?{options}", on_failure="raise")


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_counts_survive_a_restart(path: Path) -> None:
    """A file that all processes closed still has its counts when it is opened again."""
    with limiter(path) as first:
        assert [first.check("me").remaining for _ in range(3)] == [4, 3, 2]
    with limiter(path, options="") as second:
        assert second.check("me").remaining == 1


def test_counts_survive_a_reboot(path: Path) -> None:
    """A file from an earlier boot keeps its counts; the wall clock gives the elapsed time."""
    with limiter(path) as before:
        assert before.check("me", cost=4).remaining == 1
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    at = path.read_bytes().index(boot_id)
    overwrite(path, at, b"00000000-0000-0000-0000-000000000000")
    overwrite(path, at - 8, (12_345).to_bytes(8, "little"))  # the old boot's clock
    with limiter(path) as after:
        decision = after.peek("me")
        assert decision.remaining == 1
        assert 4 * 720 - 60 < decision.reset_after <= 4 * 720
    assert boot_id in path.read_bytes()


def test_only_the_owner_can_read_or_write_it(path: Path) -> None:
    """The file has mode 0600, even with umask 0."""
    before = os.umask(0)
    try:
        limiter(path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("mode", "writable", "remedy"),
    [(0o666, "every user", "666"), (0o602, "every user", "666"), (0o660, "its group", "660")],
)
def test_a_file_that_others_can_write_is_rejected(
    path: Path, mode: int, writable: str, remedy: str
) -> None:
    """Such users could lift or exhaust any limit, so the operator has to allow them."""
    limiter(path).close()
    path.chmod(mode)
    with pytest.raises(StoreUnavailable, match=rf"writable for {writable},.*chmod 600.*{remedy}"):
        limiter(path)
    limiter(path, options=f"mode={remedy}").close()


@pytest.mark.parametrize(("text", "mode"), [("600", 0o600), ("660", 0o660), ("666", 0o666)])
def test_the_mode_of_a_new_file_is_an_option(path: Path, text: str, mode: int) -> None:
    """The file has the mode of the URI, whatever the umask."""
    before = os.umask(0o077)
    try:
        limiter(path, options=f"{SMALL}&mode={text}").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    limiter(path, options=f"{SMALL}&mode={text}").close()


def test_the_mode_for_the_group_does_not_trust_every_user(path: Path) -> None:
    """mode=660 accepts a file for the group, and rejects one for every user."""
    limiter(path).close()
    path.chmod(0o666)
    with pytest.raises(StoreUnavailable, match="writable for every user"):
        limiter(path, options="mode=660")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_rejected(path: Path) -> None:
    """Its owner could write it. A file of root, or one that mode= allows, is accepted."""
    limiter(path).close()
    os.chown(path, 12_345, -1)
    with pytest.raises(
        StoreUnavailable, match=r"belongs to user 12345.*process's user 0.*mode=660"
    ):
        limiter(path)
    limiter(path, options="mode=660").close()


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """The store rejects a symbolic link, because another user could have created it."""
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        limiter(path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"\0" * 10_000, b"PK\3\4" + b"x" * 200_000],
    ids=["text", "zeros", "zip"],
)
def test_a_foreign_file_is_rejected_and_not_changed(path: Path, content: bytes) -> None:
    """The store rejects a file of another program and does not change a byte of it."""
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match="is not a Ratekeeper file and was not changed"):
        limiter(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("version", "word"), [(3, "older"), (5, "newer"), (77, "newer")])
def test_a_file_of_another_version_is_rejected(path: Path, version: int, word: str) -> None:
    """The store rejects a file with an older or newer format version."""
    limiter(path).close()
    overwrite(path, VERSION_AT, version.to_bytes(4, "little"))
    with pytest.raises(StoreUnavailable, match=f"format version {version}, which is {word}"):
        limiter(path)


def damaged_header(path: Path) -> None:
    overwrite(path, CAPACITY_AT, (101).to_bytes(8, "little"))


def zeroed_page(path: Path) -> None:
    overwrite(path, 0, b"\0" * 4_096)


def extended_again(path: Path) -> None:
    """Lose the whole mark at the end: its last byte alone is zero in one file of 256."""
    size = path.stat().st_size
    os.truncate(path, size - 16)
    os.truncate(path, size)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (damaged_header, "had a damaged header"),
        (zeroed_page, "had a damaged header"),
        (lambda path: os.truncate(path, 50), "had a damaged header"),
        (lambda path: os.truncate(path, 4_096), "had 4096 bytes instead of"),
        (lambda path: os.truncate(path, 60_000), "had 60000 bytes instead of"),
        (extended_again, "had been truncated and extended again"),
    ],
    ids=["header", "zeroed page", "50 bytes", "a page", "60,000 bytes", "extended again"],
)
def test_a_damaged_file_is_replaced(
    path: Path, damage: Callable[[Path], None], found: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A service whose file was damaged starts with fresh quotas, and the log says why."""
    with limiter(path) as before:
        before.check("me")
    damage(path)
    with limiter(path) as after:
        assert after.check("me").remaining == 4
    (record,) = (each for each in caplog.records if each.name == "ratekeeper")
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(f"{path} {found}")
    assert record.getMessage().endswith("it was replaced by a new file with fresh quotas")


def test_decisions_on_a_damaged_file_are_well_formed(path: Path) -> None:
    """Whatever bytes of the counts are wrong: no number is negative, and no wait is longer than the
    limit can cause. Only the counts may be wrong."""
    random = Random(1)
    limits = [
        Limit(20, per=60, algorithm=name, name=f"l{number}")
        for name in UNIT_ALGORITHMS
        for number in range(2)
    ]
    keys = [f"k{number}" for number in range(4)]

    def limiters(store: Store) -> list[Limiter]:
        return [Limiter(each, store=store, on_failure="raise") for each in limits]

    with closing(open_store(f"shared://{path}?{SMALL}")) as store:
        for each in limiters(store):
            for key in keys:
                each.check(key, 15)
            each.grant(keys[0], 5)
            each.settle(keys[1], 0, 1, reservation="one")
    intact = path.read_bytes()
    # Between the header and the mark at the end, whose damage replaces the whole file.
    used = [at for at in range(100, len(intact) - 20) if intact[at]]
    for _ in range(300):
        damaged = bytearray(intact)
        for at in random.choices(used, k=30):
            damaged[at + random.randrange(-4, 4)] = random.choice(
                (0, 0x7F, 0xFF, random.randrange(256))
            )
        path.write_bytes(damaged)
        with closing(open_store(f"shared://{path}?{SMALL}")) as store:
            for each in limiters(store):
                for key, cost in product(keys, (0, 1, 20)):
                    decision = each.check(key, cost)
                    assert 0 <= decision.remaining <= decision.limit <= 20 + UNITS_MAX
                    assert decision.allowed == (not decision.retry_after)
                    assert 0 <= decision.retry_after <= 180
                    assert 0 <= decision.reset_after <= 180
                    assert abs(decision.decided_ns / 1e9 - time.time()) < 60
                each.settle(keys[1], 0, 1, reservation="one")


def test_a_few_bytes_are_not_our_file(path: Path) -> None:
    """A file that is too short to have our magic number could be of any program."""
    path.write_bytes(b"RATE")
    with pytest.raises(StoreUnavailable, match="is not a Ratekeeper file and was not changed"):
        limiter(path)


def test_an_unfinished_file_is_created_again(path: Path) -> None:
    """If the creating process was killed, the next process creates the file again."""
    path.write_bytes(b"RK-MAKE\0" + b"\0" * 5_000)
    with limiter(path) as made:
        assert made.check("me").remaining == 4


def test_another_capacity_is_rejected(path: Path) -> None:
    """A file keeps the capacity it was created with; another capacity is an error."""
    limiter(path).close()
    with pytest.raises(ConfigError, match="created with capacity=100, not 200"):
        limiter(path, options="capacity=200")


def test_another_log_size_is_rejected(path: Path) -> None:
    """A file keeps the log size it was created with; another size is an error."""
    limiter(path).close()
    with pytest.raises(ConfigError, match="created with log_bytes=65536, not 131072"):
        limiter(path, options="log_bytes=131072")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("missing/folder.limits", "No such file or directory; create its folder"),
        (".", "Is a directory; name a file in it"),
    ],
)
def test_a_path_that_cannot_be_opened(tmp_path: Path, target: str, problem: str) -> None:
    """The exception contains the reason given by the operating system."""
    with pytest.raises(StoreUnavailable, match=problem):
        limiter(tmp_path / target)


def test_a_log_larger_than_the_file_is_rejected_at_once(path: Path) -> None:
    """The limiter rejects a limit whose log cannot fit when it is created, not at a later check."""
    with pytest.raises(ConfigError, match="log_bytes"):
        Limiter(
            Limit(100_000, per=60, algorithm="sliding_window_log"), store=f"shared://{path}?{SMALL}"
        )


def test_threads_that_open_a_new_file_at_once_share_it(path: Path) -> None:
    """Eight threads that open the same new file at once share one count."""
    barrier = threading.Barrier(8)
    opened: list[Limiter] = []

    def work() -> None:
        barrier.wait()
        opened.append(limiter(path))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.check("me").remaining for each in opened[:5]) == [0, 1, 2, 3, 4]
    assert not opened[5].check("me")


def test_a_full_table_rejects_new_keys_and_keeps_the_others(path: Path) -> None:
    """With a capacity of 100, key 101 raises `StoreFull`, and the other keys keep their counts."""
    with limiter(path) as full:
        for number in range(100):
            assert full.check(f"key-{number}").remaining == 4
        with pytest.raises(StoreFull, match="capacity"):
            full.check("one too many")
        assert full.stats().refused == 1
        assert full.stats().fullness == 1.0
        assert all(full.peek(f"key-{number}").remaining == 4 for number in range(100))


def test_settlements_of_keys_with_many_names_leave_room_for_other_names(path: Path) -> None:
    """60 keys settle 1,100 times each. A settlement of another key is still applied once."""
    with limiter(path, "capacity=1000", "1000/hour") as tokens:
        for key, name in product(range(60), range(1_100)):
            assert tokens.settle(f"k{key}", 1, 1, reservation=str(name)).charged == 1
        for user in range(20):
            tokens.check(f"u{user}", 50)
            for _ in range(2):
                tokens.settle(f"u{user}", 50, 40, reservation="one")
            assert tokens.peek(f"u{user}").remaining in range(960, 970)


def test_names_of_thousands_of_keys_leave_the_room_to_states(path: Path) -> None:
    """States come and go, and the names of their settlements stay for an hour."""
    with limiter(path, "capacity=1000", "100000/second") as tokens:
        for number in range(15_000):
            key = f"k{number % 5_000}"
            tokens.check(key, 2)
            tokens.settle(key, 2, 1, reservation=str(number))
    with limiter(path, "capacity=1000") as logins:
        assert all(logins.check(f"u{user}") for user in range(500))


def run_in(script: str, *arguments: object, wrapper: tuple[str, ...] = ()) -> str:
    """Run a Python script in another process and return its output."""
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OPEN_AND_REPORT = """
import sys
from ratekeeper import Limiter, StoreUnavailable
try:
    print(Limiter("5/hour", store=sys.argv[1]).check("me"))
except StoreUnavailable as error:
    print(error)
"""


def test_a_full_disk_is_an_error_at_opening_and_not_later(tmp_path: Path) -> None:
    """The whole file is allocated when it is opened, so no check can cause a bus error."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1m none "{disk}" && exec "$@"'
    in_small_disk = ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    answer = run_in(
        OPEN_AND_REPORT, f"shared://{disk}/api.limits?capacity=1000000", wrapper=in_small_disk
    )
    assert "No space left on device" in answer
    assert "smaller capacity" in answer
    answer = run_in(OPEN_AND_REPORT, f"shared://{disk}/api.limits?{SMALL}", wrapper=in_small_disk)
    assert "remaining=4/5" in answer


def test_a_read_only_file_is_an_error(tmp_path: Path) -> None:
    """On a read-only file system, the exception names the reason."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o ro none "{disk}" && exec "$@"'
    read_only = ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    answer = run_in(OPEN_AND_REPORT, f"shared://{disk}/api.limits", wrapper=read_only)
    assert "cannot be opened for writing: Read-only file system" in answer


def test_another_time_namespace_is_rejected(path: Path) -> None:
    """The store rejects a process with another boot clock, which would grant the quota twice."""
    elsewhere = ("unshare", "--map-root-user", "--time", "--boottime", "100000", "--fork")
    with limiter(path) as here:
        here.check("me")
        answer = run_in(OPEN_AND_REPORT, f"shared://{path}", wrapper=elsewhere)
        assert "time namespace" in answer
    # The only process that has the file open sets its clock. Both have the same wall clock.
    assert "remaining=3/5" in run_in(OPEN_AND_REPORT, f"shared://{path}", wrapper=elsewhere)


def test_a_descriptor_closed_by_the_application_is_not_closed_again(path: Path) -> None:
    """If a daemon has closed all descriptors, `close` must not close a reused number."""
    opened = limiter(path)
    (ours,) = (
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if os.path.realpath(entry) == str(path)
    )
    os.close(ours)
    taken = os.open("/dev/null", os.O_RDONLY)
    try:
        if taken != ours:
            os.dup2(taken, ours)
        assert opened.check("me").remaining == 4
        opened.close()
        os.fstat(ours)
    finally:
        os.close(taken)


def test_a_check_on_a_closed_store_raises(path: Path) -> None:
    """A check after `close` raises `StoreUnavailable`."""
    closed = limiter(path)
    closed.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        closed.check("me")
