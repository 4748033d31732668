"""A limiter that follows its rules: what is new comes into force, and nothing else happens."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.redis_servers.waiting import until
from tollkeeper import AsyncLimiter, Limit, Limiter, Request
from tollkeeper.control import follow, snapshot
from tollkeeper.control.follow import PAUSE_S_LONGEST, Pause
from tollkeeper.control.sources import Found
from tollkeeper.core.errors import ConfigError, StoreUnavailable
from tollkeeper.rules.document.model import Document, Rule

SECONDS_MAX = 20.0
NEVER_S = 3_600.0
ASKED = Request(user="42")

FORKING = """
import os, sys, warnings
from pathlib import Path
from tests.redis_servers.waiting import until
from tollkeeper import Limiter, Request

# Python 3.12 and later warn every application that forks while a thread runs, as this one does
# on purpose. Anything else on stderr fails the test.
warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\\(\\)", DeprecationWarning)
path = Path(sys.argv[1])
limiter = Limiter.from_rules(path, poll=0.1)
child = os.fork()
if child == 0:
    try:
        # In force in the child, though nobody there has started anything.
        until(lambda: limiter.check(Request(user="42")).limit == 7, "the new limit", 15)
        assert limiter.rules_status().error == ""
        limiter.close()
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
path.write_text("version: 1\\nrules: [{id: all, by: user, limits: 7/minute}]")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def document(limit: int) -> Document:
    return Document(rules=(Rule("all", ("user",), (Limit(limit, per=60),)),))


def found(limit: int) -> Found:
    """A version that its limit tells."""
    return Found(f"v{limit}", document(limit))


class Scripted:
    """A source that says what a test wants it to."""

    name = "scripted"

    def __init__(self, says: Found | Exception) -> None:
        self.says = says
        self.looks = 0
        self.hints_left = 0
        self.hints_fail = False
        self.closed = 0

    async def current(self, known: str) -> Found | None:
        self.looks += 1
        if isinstance(self.says, Exception):
            raise self.says
        return None if self.says.version == known else self.says

    async def hints(self) -> AsyncGenerator[None, None]:
        while True:
            await asyncio.sleep(0.005)
            if self.hints_fail:
                raise StoreUnavailable("nobody to listen to")
            if self.hints_left:
                self.hints_left -= 1
                yield

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted(found(5))
    monkeypatch.setattr(follow, "source_of", lambda rules: scripted)
    # A failing source is asked again at once: what is long in production is short here.
    monkeypatch.setattr(follow, "PAUSE_S_LONGEST", 0.02)
    return scripted


class Opened:
    """Limiters that a test has made, closed at its end."""

    def __init__(self) -> None:
        self._limiters: list[Limiter] = []

    def __call__(self, rules: Any = "scripted", **options: Any) -> Limiter:
        limiter = Limiter.from_rules(rules, **{"poll": 0.05, **options})
        self._limiters.append(limiter)
        return limiter

    def close(self) -> None:
        for limiter in self._limiters:
            limiter.close()


@pytest.fixture
def opened() -> Iterator[Opened]:
    limiters = Opened()
    yield limiters
    limiters.close()


def in_force(limiter: Limiter) -> int:
    """By what a request meets, not by what the status says."""
    return limiter.check(ASKED).limit


def await_limit(limiter: Limiter, limit: int) -> None:
    until(
        lambda: in_force(limiter) == limit,
        f"a limit of {limit} is in force",
        SECONDS_MAX,
        limiter.rules_status,
    )


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("tollkeeper-rules")]


def test_a_new_version_comes_into_force(source: Scripted, opened: Opened) -> None:
    """Without a hint, by asking; and the status says so."""
    limiter = opened()
    first = limiter.rules_status()
    assert (first.version, first.source, first.origin) == ("v5", "scripted", "source")
    assert in_force(limiter) == 5
    source.says = found(6)
    await_limit(limiter, 6)
    now = until(
        lambda: status if (status := limiter.rules_status()).since != first.since else None,
        "the status follows",
        SECONDS_MAX,
    )
    assert (now.version, now.origin, now.error) == ("v6", "source", "")
    assert first.since is not None
    assert now.since is not None
    assert now.since > first.since
    assert now.age is not None
    assert 0 <= now.age < SECONDS_MAX


def test_a_hint_does_not_wait_for_the_next_question(source: Scripted, opened: Opened) -> None:
    """With an hour between questions, a change that is pushed is in force at once."""
    limiter = opened(poll=NEVER_S)
    until(lambda: source.looks >= 2, "it follows", SECONDS_MAX)
    source.says = found(6)
    source.hints_left = 1
    await_limit(limiter, 6)


def test_a_hundred_hints_are_few_questions(source: Scripted, opened: Opened) -> None:
    """Hints that come while it asks, or while it holds back, are one."""
    opened(poll=NEVER_S)
    until(lambda: source.looks >= 2, "it follows", SECONDS_MAX)
    source.hints_left = 100
    until(lambda: source.hints_left == 0, "all were given", SECONDS_MAX)
    assert source.looks < 80


@pytest.mark.parametrize(
    "error", [StoreUnavailable("it is away"), RuntimeError("a defect"), OSError(5, "I/O error")]
)
def test_a_source_that_is_away_changes_nothing(
    source: Scripted, opened: Opened, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises: the last good rules stay, it is told once, and then caught up with."""
    limiter = opened()
    with caplog.at_level(logging.WARNING, "tollkeeper.rules"):
        source.says = error
        until(lambda: limiter.rules_status().error, "it is told", SECONDS_MAX)
        looks = source.looks
        until(lambda: source.looks > looks + 5, "it is asked again and again", SECONDS_MAX)
    assert limiter.rules_status().error == str(error)
    assert limiter.rules_status().failures >= 5
    assert in_force(limiter) == 5
    assert [record.message for record in caplog.records] == [
        f"rules: version v5 stays in force: {error}"
    ]
    source.says = found(6)
    await_limit(limiter, 6)
    until(lambda: not limiter.rules_status().error, "it is well again", SECONDS_MAX)


def test_a_source_that_comes_back_unchanged_is_well_again(source: Scripted, opened: Opened) -> None:
    """The error goes, though there is no new version."""
    limiter = opened()
    source.says = StoreUnavailable("it is away")
    until(lambda: limiter.rules_status().error, "it is told", SECONDS_MAX)
    source.says = found(5)
    until(lambda: not limiter.rules_status().error, "it is well again", SECONDS_MAX)


def test_the_age_grows_while_the_source_is_away(source: Scripted, opened: Opened) -> None:
    """It is that of the last good look, for an alarm to go by."""
    limiter = opened()
    source.says = StoreUnavailable("it is away")
    until(lambda: limiter.rules_status().error, "it is told", SECONDS_MAX)
    before = limiter.rules_status().age
    looks = source.looks
    until(lambda: source.looks > looks, "it was asked once more", SECONDS_MAX)
    after = limiter.rules_status().age
    assert before is not None
    assert after is not None
    assert after > before


def test_rules_that_cannot_be_used_are_not(
    source: Scripted, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that the limiter refuses leaves the old one in force."""
    limiter = opened()

    def refuse(rules: object, version: str = "") -> None:
        raise ConfigError("not on this store")

    monkeypatch.setattr(limiter, "use", refuse)
    source.says = found(6)
    until(lambda: limiter.rules_status().error, "it is told", SECONDS_MAX)
    assert limiter.rules_status().error == "not on this store"
    assert limiter.rules_status().version == "v5"
    assert in_force(limiter) == 5


def test_hints_that_fail_leave_the_questions(source: Scripted, opened: Opened) -> None:
    """Push that is cut off is told apart from a source that is away; both come back."""
    source.hints_fail = True
    limiter = opened()
    until(lambda: limiter.rules_status().push_error, "it is told", SECONDS_MAX)
    assert limiter.rules_status().push_error == "nobody to listen to"
    source.says = found(6)
    await_limit(limiter, 6)
    assert limiter.rules_status().error == ""
    source.hints_fail = False
    source.hints_left = 1
    until(lambda: not limiter.rules_status().push_error, "push is back", SECONDS_MAX)


def test_closing_ends_the_thread(source: Scripted) -> None:
    """And the source is closed; nothing is asked any more."""
    before = len(threads())
    limiter = Limiter.from_rules("scripted", poll=0.05)
    until(lambda: source.looks >= 2, "it follows", SECONDS_MAX)
    assert len(threads()) == before + 1
    closed = source.closed
    limiter.close()
    assert len(threads()) == before
    assert source.closed == closed + 1
    limiter.close()


def test_a_limiter_that_is_dropped_is_not_kept_alive(source: Scripted) -> None:
    """Nobody has to close it: the thread does not hold it, and ends with it."""
    before = len(threads())
    limiter = Limiter.from_rules("scripted", poll=0.05)
    until(lambda: source.looks >= 2, "it follows", SECONDS_MAX)
    alive = weakref.ref(limiter)
    del limiter
    until(lambda: gc.collect() or alive() is None, "the limiter is gone", SECONDS_MAX)
    until(lambda: len(threads()) == before, "its thread is gone", SECONDS_MAX)


async def test_asyncio_follows_as_well(source: Scripted) -> None:
    """In a thread of its own: the application's loop has nothing to do with it."""
    async with AsyncLimiter.from_rules("scripted", poll=0.05) as limiter:
        source.says = found(6)
        await asyncio.to_thread(
            until, lambda: limiter.rules_status().version == "v6", "v6 is in force", SECONDS_MAX
        )
        assert (await limiter.check(ASKED)).limit == 6
    looks = source.looks
    await asyncio.sleep(0.1)
    assert source.looks == looks


def test_not_following_is_one_look(source: Scripted, opened: Opened) -> None:
    """`follow=False` reads once, and starts no thread."""
    before = threads()
    limiter = opened(follow=False)
    assert threads() == before
    assert source.looks == 1
    assert limiter.rules_status().origin == "source"


def test_rules_at_hand_are_not_followed(opened: Opened) -> None:
    """A Document has no source, and its status says so."""
    before = threads()
    limiter = opened(document(5))
    assert threads() == before
    status = limiter.rules_status()
    assert (status.version, status.source, status.origin, status.age) == ("", "", "given", None)
    limiter.use(document(6), "mine")
    assert limiter.rules_status().version == "mine"


def test_limits_have_no_status_of_rules() -> None:
    """A limiter without rules says how to make one with."""
    with pytest.raises(ConfigError, match="has limits, not rules"):
        Limiter("5/minute").rules_status()


@pytest.mark.parametrize("poll", [0, 0.01, 1e9, float("nan"), "1", None, True])
def test_a_poll_that_is_no_sensible_time_is_refused(poll: Any) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=r"is not a number of seconds from 0\.05 to 3600"):
        Limiter.from_rules("no such file", poll=poll)


def test_a_snapshot_is_kept_up_to_date(source: Scripted, opened: Opened, tmp_path: Path) -> None:
    """From the start, and with every version that comes into force."""
    place = tmp_path / "rules.snapshot"
    opened(snapshot=place)
    kept = snapshot.load(place)
    assert kept is not None
    assert (kept.version, kept.source) == ("v5", "scripted")
    source.says = found(6)
    until(lambda: "v6" in place.read_text(), "it is saved", SECONDS_MAX)
    kept = snapshot.load(place)
    assert kept is not None
    assert kept.document == document(6)


def test_a_start_while_the_source_is_away(source: Scripted, opened: Opened, tmp_path: Path) -> None:
    """From the snapshot, which the status tells; and the source is caught up with."""
    place = tmp_path / "rules.snapshot"
    snapshot.save(place, "v5", document(5), "scripted")
    source.says = StoreUnavailable("it is away")
    limiter = opened(snapshot=place)
    status = limiter.rules_status()
    assert (status.version, status.origin, status.age) == ("v5", "snapshot", None)
    assert status.error == "it is away"
    assert in_force(limiter) == 5
    source.says = found(6)
    await_limit(limiter, 6)
    until(lambda: limiter.rules_status().origin == "source", "caught up", SECONDS_MAX)
    assert limiter.rules_status().error == ""


def test_the_same_version_from_the_source_confirms_the_snapshot(
    source: Scripted, opened: Opened, tmp_path: Path
) -> None:
    """Its number alone is not believed: what counts is the source's text."""
    place = tmp_path / "rules.snapshot"
    snapshot.save(place, "v6", document(5), "scripted")
    source.says = StoreUnavailable("it is away")
    limiter = opened(snapshot=place)
    source.says = found(6)
    await_limit(limiter, 6)


def test_a_start_with_nothing_at_all_is_refused(source: Scripted, tmp_path: Path) -> None:
    """No source, no snapshot: the source's error, and no limiter that lets all pass."""
    source.says = StoreUnavailable("it is away")
    for place in (None, tmp_path / "rules.snapshot"):
        with pytest.raises(StoreUnavailable, match="it is away"):
            Limiter.from_rules("scripted", snapshot=place)


def test_a_damaged_snapshot_is_not_used(source: Scripted, tmp_path: Path) -> None:
    """The source's error is raised, with a note that says why the snapshot does not help."""
    place = tmp_path / "rules.snapshot"
    snapshot.save(place, "v5", document(5), "scripted")
    place.write_bytes(place.read_bytes()[:-5])
    source.says = StoreUnavailable("it is away")
    with pytest.raises(StoreUnavailable, match="it is away") as caught:
        Limiter.from_rules("scripted", snapshot=place)
    assert "is not used: it says" in caught.value.__notes__[0]


def test_a_damaged_snapshot_is_replaced(source: Scripted, opened: Opened, tmp_path: Path) -> None:
    """While the source is there, nobody needs it."""
    place = tmp_path / "rules.snapshot"
    place.write_text("damaged")
    opened(snapshot=place)
    assert snapshot.load(place) is not None


def test_a_snapshot_that_cannot_be_written_is_told(
    source: Scripted, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk stops nobody: the rules are in force, and it is tried again."""
    place = tmp_path / "rules.snapshot"
    limiter = opened(snapshot=place)
    save = snapshot.save

    def fail(*args: Any) -> None:
        raise StoreUnavailable("the snapshot cannot be written: No space left")

    monkeypatch.setattr(snapshot, "save", fail)
    source.says = found(6)
    await_limit(limiter, 6)
    until(lambda: "No space" in limiter.rules_status().error, "it is told", SECONDS_MAX)
    monkeypatch.setattr(snapshot, "save", save)
    until(lambda: "v6" in place.read_text(), "it is saved", SECONDS_MAX)
    until(lambda: not limiter.rules_status().error, "all is well", SECONDS_MAX)


def test_a_place_for_the_snapshot_is_checked_first(source: Scripted, tmp_path: Path) -> None:
    """A folder that is not there is told at the start, not on the day it is needed."""
    with pytest.raises(ConfigError, match="folder that exists"):
        Limiter.from_rules("scripted", snapshot=tmp_path / "no" / "rules.snapshot")
    assert source.looks == 0


def test_pauses_grow_to_a_bound() -> None:
    """A source that is away for long is asked every few seconds, by each node at another time."""
    pause = Pause()
    pauses = [pause.next_s() for _ in range(20)]
    assert pauses[0] <= 0.1
    assert all(PAUSE_S_LONGEST / 2 <= each <= PAUSE_S_LONGEST for each in pauses[-10:])
    assert len(set(pauses[-10:])) > 5
    pause.reset()
    assert pause.next_s() <= 0.1


def test_a_forked_worker_follows_too(tmp_path: Path) -> None:
    """A server that loads the application and then forks has workers that see changes."""
    path = tmp_path / "limits.yaml"
    path.write_text("version: 1\nrules: [{id: all, by: user, limits: 5/minute}]")
    ran = subprocess.run(
        [sys.executable, "-c", FORKING, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
