"""Every command of the documentation runs, as a reader would type it.

The commands of a page's ```sh and ```console blocks run in order, in one folder. They call one real
service and one real Redis, at their own addresses instead of those on the page. `NOT_RUN` lists the
commands that cannot run here. `tests/test_tutorial.py` types the tutorial.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

import pytest
import yaml

from ratekeeper.control.repository import Repository
from ratekeeper.rules.document.reading import read
from tests.preloaded_command import PreloadedCommand
from tests.redis_servers.ports import free_port
from tests.redis_servers.scratch import scratch
from tests.redis_servers.single import Single
from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import ServiceProcess
from tests.test_readme import FENCE, PAGES, ROOT, page_id

SECONDS_MAX: Final = 120.0
BLOCK: Final = re.compile(r"^```(sh|console)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONFIG: Final = re.compile(r"^```yaml\n# ratekeeper\.yaml(.*?)^```$", re.DOTALL | re.MULTILINE)
EXTRAS: Final = re.compile(r"\[([a-z,]+)\]")
# These commands run until a signal. The test ends them when they have written their file.
FOLLOWS: Final = re.compile(r" --(?:follow|every) ")
WRITES: Final = re.compile(r"(?:--output|>>) (\S+)")

COMMANDS: Final = "docs/command-line.md"
ORDER: Final = "--api-key sk_1 --endpoint /v1/orders/7 --method POST"
RECONCILE: Final = "ratekeeper reconcile --store redis://127.0.0.1:6379 --rules limits.yaml"
Table = Mapping[tuple[str, str], Any]
# (page, beginning of the command): why it does not run. An empty page means any page.
NOT_RUN: Final[Table] = {
    ("", "make "): "it takes too long; tests/test_readme.py checks that the target exists",
    ("", "pip install "): "it needs a package index; tests/test_packages.py installs the packages",
    ("docs/deploy.md", "python3 -m venv /opt/"): "tests/test_packages.py makes an environment",
    ("docs/deploy.md", "/opt/ratekeeper/bin/"): "tests/test_packages.py installs the packages",
    ("docs/deploy.md", "docker "): "it needs an image; tests/test_deploy.py runs its command",
    ("docs/deploy.md", "useradd "): "it changes the machine",
    ("docs/deploy.md", "systemctl "): "tests/test_deploy.py runs the command of the unit",
    ("docs/deploy.md", "journalctl "): "there is no unit",
    ("docs/deploy.md", "cd .. && kubectl "): "tests/test_deploy.py runs the command of two pods",
    ("docs/deploy.md", "kubectl "): "it needs a cluster",
    ("docs/gateways.md", "envoy "): "tests/integration/test_envoy.py runs this configuration",
    ("docs/gateways.md", "curl -i http://127.0.0.1:10000"): "test_envoy.py sends such requests",
    ("docs/gateways.md", "nginx "): "tests/integration/test_nginx.py runs this configuration",
    ("docs/gateways.md", "curl -i http://127.0.0.1:10080"): "test_nginx.py sends such requests",
    ("docs/metrics.md", "promtool "): "tests/integration/test_alerts.py runs these tests, for 3 s",
}
# (page, beginning of the command): its exit code, and a text that it prints. Others exit with 0.
FAILS: Final[Table] = {
    (COMMANDS, "ratekeeper rules validate limits.yaml"): (1, "fortnight"),
    (COMMANDS, "ratekeeper rules diff "): (1, "+++ "),
    (COMMANDS, "ratekeeper entries import bad.csv"): (1, "bad.csv:3:1"),
    (COMMANDS, f"ratekeeper check {ORDER} --count 12"): (1, "denied"),
    (COMMANDS, "ratekeeper reconcile "): (1, "problem  no expiry"),
    (COMMANDS, f"{RECONCILE} --repair=all | grep"): (0, "removed"),
    ("docs/console.md", "ratekeeper console end 3f2a91c05d7e"): (2, "no session"),
    ("docs/control.md", "ratekeeper rules diff 1 2"): (1, "+++ "),
}
# (page, beginning of the command): commands that first bring the folder or Redis into the state
# that the page assumes.
BEFORE: Final[Table] = {
    ("docs/admin-api.md", "ratekeeper serve "): "rm rules.db",
    (COMMANDS, "ratekeeper rules validate limits.yaml"): "cp wrong.yaml limits.yaml",
    (COMMANDS, "ratekeeper rules diff limits.yaml"): "cp shop.yaml limits.yaml",
    (COMMANDS, "export RATEKEEPER_DATABASE="): "cp shop.yaml limits.yaml",
    (COMMANDS, f"ratekeeper quota {ORDER}"): f"ratekeeper reset {ORDER}",
    # `reconcile` has no default for the service. The rules of this one get too little traffic.
    (COMMANDS, RECONCILE): """
        export RATEKEEPER_URL=
        redis-cli -u "$REDIS" hset 'rk:{%AAA}' orders unreadable
    """,
    ("docs/operate.md", "ratekeeper reconcile "): "export RATEKEEPER_URL=",
}
# `curl` fails for a status that is not 2xx, and sends a token if the page gives none. Variables and
# the current folder are those after the last command.
PRELUDE: Final = """
curl() {
    [[ $* == *-fsS* ]] || set -- --fail-with-body --silent --show-error "$@"
    [[ $* == *Authorization* ]] || set -- -H "Authorization: Bearer $TOKEN" "$@"
    command curl --max-time 60 "$@"
}
. "$STATE"
cd "$PWD"
trap 'declare -px > "$STATE"' EXIT
"""


class Command(NamedTuple):
    """A command, and the lines of output that the page shows."""

    text: str
    shown: list[str]


def commands(text: str) -> list[Command]:
    """Return the commands of all blocks of a page."""
    found: list[Command] = []
    for language, block in BLOCK.findall(text):
        before, unfinished = len(found), ""
        for line in block.splitlines():
            if unfinished or language == "sh" or line.startswith("$ "):
                typed = line if unfinished or language == "sh" else line[2:]
                unfinished = f"{unfinished}{typed}\n"
                if is_whole(unfinished):
                    if shlex.split(unfinished, comments=True):
                        found.append(Command(unfinished.strip(), []))
                    unfinished = ""
            elif len(found) > before:
                found[-1].shown.append(line)
        assert not unfinished, f"this command does not end:\n{unfinished}"
    return found


def is_whole(text: str) -> bool:
    """Return True if a command does not continue on the next line."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return not text.endswith("\\\n")


def first_words(lines: list[str]) -> set[str]:
    """Return the first word of each line."""
    return {words[0] for line in lines if (words := line.split())}


def key_of(table: Table, page: str, command: str) -> tuple[str, str] | None:
    """Return the key of the table's entry for a command, the longest if several fit, or None."""
    keys = [key for key in table if key[0] in ("", page) and command.startswith(key[1])]
    return max(keys, key=lambda key: len(key[1]), default=None)


def entry(table: Table, page: str, command: str) -> Any:
    """Return the table's entry for a command, or None."""
    key = key_of(table, page, command)
    return None if key is None else table[key]


ALL: Final = {
    page_id(page): found
    for page in PAGES
    if page_id(page) != "docs/tutorial.md" and (found := commands(page.read_text(encoding="utf-8")))
}


def shop() -> dict[str, Any]:
    """Return the example rules, with the rule in shadow mode and the load that pages name."""
    rules: dict[str, Any] = yaml.safe_load((ROOT / "examples/limits.yaml").read_text())
    del rules["overrides"]  # One ends at a time that YAML reads as a date.
    position = [rule["id"] for rule in rules["rules"]].index("api")
    replaced = rules["rules"][position]
    trial = {"id": "stricter", "limits": ["20/minute"], "mode": "shadow", "replaces": "api"}
    rules["rules"].insert(position, {**trial, "match": replaced["match"], "by": replaced["by"]})
    orders, service = (
        next(rule for rule in rules["rules"] if rule["id"] == name)
        for name in ("orders", "service")
    )
    # No slow machine gets another unit before the test ends.
    orders["limits"] = ["10/hour"]
    queue = {"source": "queue_depth", "low": 100, "high": 500, "least": 0.2}
    service["scale"] = [service["scale"], queue]
    return rules


async def make_database(path: Path) -> None:
    """Make a rule database with seven versions of the rules."""
    async with await Repository.open(f"sqlite:///{path}") as repository:
        for number in range(7):
            rules = shop()
            rules["tiers"]["free"] = [f"{100 + number}/minute"]
            await repository.apply(read(json.dumps(rules)), author="ann", expected=number)


class World:
    """The service, the Redis and the folder of files that every page starts with."""

    def __init__(self, folder: Path, regions: dict[str, Single], command: PreloadedCommand) -> None:
        self.command = command
        self.files = folder / "files"
        self._fill()
        self.served: set[str] = set()
        self.regions = {name: each.uri for name, each in regions.items()}
        self.redis = self.regions["eu"]
        self.token = secrets_of(folder)["admin"]
        table = [
            part
            for name, uri in self.regions.items()
            for part in ("--regions", f"{name}={uri}?deadline_ms=10000&connect_ms=10000")
        ]
        self.service = ServiceProcess(
            f"sqlite:///{folder}/rules.db",
            *("--seed", str(self.files / "limits.yaml"), "--tokens", str(folder / "tokens.json")),
            *("--region", "eu", *table, "--gossip", f"127.0.0.1:{free_port()}"),
            *("--drain-seconds", "0"),
            records=True,
        )

    def _fill(self) -> None:
        examples = ROOT / "examples"
        shutil.copytree(ROOT / "deploy", self.files / "deploy")
        shutil.copytree(examples, self.files / "examples")
        for name in ("limits.yaml", "shop.yaml", "old.yaml", "new.yaml"):
            rules = shop() | {"deny": ["api_key:sk_revoked"]} if name == "new.yaml" else shop()
            (self.files / name).write_text(json.dumps(rules))
        wrong = "version: 1\nrules:\n  - id: all\n    by: [user]\n    limits: 10/fortnight\n"
        (self.files / "wrong.yaml").write_text(wrong)
        (self.files / "customers.csv").write_text("subject,tier\nuser:7,pro\ntenant:initech,free\n")
        (self.files / "bad.csv").write_text("subject,tier\nuser:1,pro\nuser:2,gold\nnobody,pro\n")
        shutil.copy(examples / "migrate/envoy-ratelimit/after.yaml", self.files)
        for name in ("bash_completion.d", "nginx", "nftables.d", "systemd/system"):
            (self.files / "etc" / name).mkdir(parents=True)
        for name in ("zsh/site-functions", "fish/vendor_completions.d"):
            (self.files / "usr/share" / name).mkdir(parents=True)
        (self.files / "var/log").mkdir(parents=True)
        asyncio.run(make_database(self.files / "rules.db"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start the service, with the Redis of its region and those of two others."""
    with PreloadedCommand() as command, Single() as eu, Single() as us, Single() as ap:
        made = World(tmp_path_factory.mktemp("world"), {"eu": eu, "us": us, "ap": ap}, command)
        with made.service:
            yield made


class Reader:
    """A reader who types the commands of one page in a folder."""

    def __init__(self, page: str, world: World, folder: Path) -> None:
        self.page = page
        self.folder = folder / "page"
        self._world = world
        self._last_status = 0
        shutil.copytree(world.files, self.folder)
        state = folder / "state"
        state.touch()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("RATEKEEPER_", "PYTEST"))}
        self._installed = Path(sys.executable).parent
        programs = (world.command.folder, self._installed)
        self._environment = clean | {
            "PATH": os.pathsep.join(map(str, (*programs, os.environ["PATH"]))),
            "STATE": str(state),
            # A short path: the service makes sockets there, whose names have at most 107 bytes.
            "XDG_STATE_HOME": str(scratch().new_folder("page")),
            "REDIS": world.redis,
            "TOKEN": world.token,
            "RATEKEEPER_TOKEN": world.token,
            "RATEKEEPER_URL": world.service.url,
            "RATEKEEPER_TIMEOUT": "60",
            "RATEKEEPER_PORT": "0",
            "RATEKEEPER_GRPC": "127.0.0.1:0",
            "RATEKEEPER_WORKERS": "1",
            "RATEKEEPER_DRAIN_SECONDS": "0",
            "RATEKEEPER_LOG_FORMAT": "json",
        }
        self._places: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
            (r"(?:http://)?(?:127\.0\.0\.1|localhost):8080", world.service.url),
            (r"redis\+cluster://h1:7000,h2:7000", world.redis),
            (r"redis://(?:localhost|cache|127\.0\.0\.1:6379)", world.redis),
            (r"\S+://limits\.eu\.example\.com", world.regions["eu"]),
            (r"\S+://\S+@limits\.(us|ap)\.example\.com", lambda found: world.regions[found[1]]),
            (r"10\.0\.0\.5:7946", f"127.0.0.1:{free_port()}"),
            (r"(?<= )/(?=(?:etc|usr/share|var/log)/)", f"{self.folder}/"),
            (r"\brk_(?:…|\.\.\.)", world.token),
            (r"^\.venv/bin/python\b", "python"),
            # These programs change other machines, or this one.
            (r'--reload "[^"]+"', "--reload true"),
            # One pass is enough.
            (r"\bratekeeper top\b", "ratekeeper top --once --interval 1"),
        ]

    def here(self, text: str) -> str:
        """Return a text with the addresses and folders of this test."""
        for pattern, value in self._places:
            text = re.sub(pattern, value, text)
        return text

    def type(self, command: Command) -> None:
        """Run a command as its kind requires, and check its exit code and output."""
        text = self.here(command.text)
        if (before := entry(BEFORE, self.page, command.text)) is not None:
            self.run(f"set -e; {before}")
        if text.startswith("ratekeeper serve "):
            self.serve(text)
        elif FOLLOWS.search(text):
            self.follow(text)
        else:
            status, says = entry(FAILS, self.page, command.text) or (0, "")
            printed = self.run(text, status)
            assert says in printed, f"{command.text}\nprinted:\n{printed}"
            shown = first_words(command.shown)
            if shown:
                assert shown & first_words(printed.splitlines()), f"{text}\nprinted:\n{printed}"

    def run(self, text: str, status: int = 0) -> str:
        """Run a command to its end, and return what it printed."""
        done = subprocess.run(
            self._bash(f"(exit {self._last_status})\n{text}"),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == status, f"{text}\nexited with {done.returncode}:\n{done.stdout}"
        self._last_status = done.returncode
        return done.stdout

    def serve(self, text: str) -> None:
        """Start a service, wait until it is ready, and stop it.

        Several pages start one with the same options; one start is enough. A service also starts if
        it cannot reach the database of its records, or the issuer of its clients' tokens.
        """
        words = shlex.split(text.replace("\\\n", ""), comments=True)
        text = shlex.join(word for word in words if word != "&")
        if text in self._world.served:
            return
        self._world.served.add(text)
        log = self.folder / "serve.log"

        def is_ready() -> bool:
            lines = log.read_text().splitlines()
            started = [line for line in lines if '"event": "started"' in line]
            try:
                url = json.loads(started[0])["url"]
                with urlopen(f"{url}/readyz", timeout=SECONDS_MAX) as answer:
                    return bool(answer.status == 200)
            except (IndexError, ValueError, OSError):  # or half a line is written
                return False

        self._until(is_ready, text, log)

    def follow(self, text: str) -> None:
        """Run a command until it has written its file, and end it."""
        found = WRITES.search(text)
        assert found, f"{text}: this command writes no file"
        file = Path(found[1])
        self._until(lambda: file.exists() and file.stat().st_size > 0, text, self.folder / "log")

    def _until(self, condition: Callable[[], bool], text: str, log: Path) -> None:
        """Run a command until a condition holds, and end it by SIGTERM."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._bash(f"exec {self._installed}/{text}"),
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=scratch().process_group,
            )
        try:
            until(
                lambda: process.poll() is not None or condition(), text, SECONDS_MAX, log.read_text
            )
            assert process.poll() is None, f"{text}\nhas ended:\n{log.read_text()}"
            process.terminate()
            status = process.wait(SECONDS_MAX)
            assert status in (0, -signal.SIGTERM), (
                f"{text}\nexited with {status}:\n{log.read_text()}"
            )
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _bash(self, text: str) -> list[str]:
        return ["bash", "-c", f"{PRELUDE}{text}\n"]


@pytest.mark.parametrize("page", ALL)
def test_the_commands_of_a_page_run(page: str, world: World, tmp_path: Path) -> None:
    """Each exits with 0, or with the code that the page names, and prints what the page shows."""
    reader = Reader(page, world, tmp_path)
    for text in CONFIG.findall((ROOT / page).read_text(encoding="utf-8")):
        (reader.folder / "ratekeeper.yaml").write_text(reader.here(f"#{text}"))
    for command in ALL[page]:
        if entry(NOT_RUN, page, command.text) is None:
            reader.type(command)


def test_the_tables_have_no_entry_without_a_command() -> None:
    """An entry for a command that has changed or is gone would hide a mistake."""
    for table in (NOT_RUN, FAILS, BEFORE):
        used = {key_of(table, page, each.text) for page, found in ALL.items() for each in found}
        assert set(table) <= used


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_of_commands_have_the_form_that_is_run(page: Path) -> None:
    """A block in another form, such as an indented one or ```bash, would be run by no test."""
    text = page.read_text(encoding="utf-8")
    fences = [each for each in FENCE.findall(text) if re.match(r"(ba|z|)sh|shell|console", each)]
    assert len(fences) == len(BLOCK.findall(text))


def test_the_extras_that_pages_install_exist() -> None:
    """Pip only warns about an extra that does not exist."""
    known = set(metadata("ratekeeper").get_all("Provides-Extra") or ())
    texts = [each.text for found in ALL.values() for each in found if "pip install" in each.text]
    named = {name for text in texts for group in EXTRAS.findall(text) for name in group.split(",")}
    assert named
    assert named <= known


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("ratekeeper rules wrong", "No such command"),
        ("ratekeeper top --wrong", "No such option"),
        ("ratekeeper serve --wrong &", "No such option"),
        ("curl http://127.0.0.1:8080/v1/nothing", "404"),
        ("ratekeeper rules validate nothing.yaml | cat", "nothing.yaml"),
    ],
)
def test_a_wrong_command_is_found(typed: str, says: str, world: World, tmp_path: Path) -> None:
    """A wrong name, option or path, or another output, fails the test of the page."""
    [command] = commands(f"```console\n$ {typed}\nok\n```\n")
    with pytest.raises(AssertionError, match=says):
        Reader("README.md", world, tmp_path).type(command)


def test_commands_are_read_from_blocks() -> None:
    """Continued lines and open quotes make one command; comments and outputs are none."""
    text = "```sh\n# no\na 'b\nc'  # it's\nd \\\n  e\n```\n```console\n$ f \\\n  g\nout\n$ h\n```\n"
    assert commands(text) == [
        Command("a 'b\nc'  # it's", []),
        Command("d \\\n  e", []),
        Command("f \\\n  g", ["out"]),
        Command("h", []),
    ]
