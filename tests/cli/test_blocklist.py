"""`ratekeeper blocklist`: the entries, their ends, and the file for each format."""

from __future__ import annotations

import shutil
import subprocess
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.cli.blocklist import (
    Ends,
    merged,
    nft_text,
    nginx_text,
    plain_text,
    read_ends,
    replace_file,
    update,
)
from ratekeeper.core.errors import ConfigError
from tests.cli.stub_service import run, stub_service

NOW_S = 1_800_000_000.0
V4, V6 = ip_network("192.0.2.7"), ip_network("2001:db8::/64")


def answer(*items: tuple[str, float], **more: Any) -> dict[str, Any]:
    """Return a reply of the service; each item is a network and the age of its last denial."""
    rows = [{"network": each, "denied": 1_000, "age_seconds": age_s} for each, age_s in items]
    return {"items": rows, "exempt": [], "exempt_omitted": False, **more}


def test_an_entry_ends_some_time_after_its_last_denial() -> None:
    """Another denial extends it, and an old streak does not list it again."""
    ends = merged({}, answer(("192.0.2.7", 10), ("2001:db8::/64", 0)), NOW_S, 60, 10)
    assert ends == {V4: NOW_S + 50, V6: NOW_S + 60}
    ends = merged(ends, answer(("192.0.2.7", 0)), NOW_S + 20, 60, 10)
    assert ends == {V4: NOW_S + 80, V6: NOW_S + 60}
    assert merged(ends, answer(("192.0.2.7", 60)), NOW_S + 80, 60, 10) == {}


def test_an_entry_that_becomes_exempt_goes() -> None:
    """Also one that only overlaps an exempt network; all unknown ones if some are omitted."""
    known = {V4: NOW_S + 50, V6: NOW_S + 50}
    exempt = answer(exempt=["192.0.2.0/24", "2001:db8::5"])
    assert merged(known, exempt, NOW_S, 60, 10) == {}
    kept = merged(known, answer(("192.0.2.7", 0), exempt_omitted=True), NOW_S, 60, 10)
    assert list(kept) == [V4]


def test_the_number_of_entries_is_bounded() -> None:
    """Those that last longest stay."""
    rows = [(f"10.0.{n // 256}.{n % 256}", float(n)) for n in range(1_000)]
    ends = merged({}, answer(*rows), NOW_S, 3_600, 3)
    assert [str(each) for each in ends] == ["10.0.0.0/32", "10.0.0.1/32", "10.0.0.2/32"]


networks = st.one_of(
    st.ip_addresses(v=4).map(ip_network),
    st.ip_addresses(v=6).map(lambda each: ip_network(each).supernet(new_prefix=64)),
)


@given(st.dictionaries(networks, st.floats(1.8e9, 1.9e9), max_size=5))
def test_a_file_is_read_again(tmp_path_factory: pytest.TempPathFactory, ends: Ends) -> None:
    """In each format, with ends that are at most a minute later."""
    path = tmp_path_factory.mktemp("lists") / "blocked"
    for write in (nginx_text, nft_text, plain_text):
        path.write_text(write(ends))
        found = read_ends(path)
        assert set(found) == set(ends)
        assert all(0 <= found[each] - end_s <= 60 for each, end_s in ends.items())
        assert write(found) == path.read_text()  # each run of the command reads and writes it


def test_the_formats() -> None:
    """nginx takes `deny` lines, nft a table."""
    ends = {V6: NOW_S, V4: NOW_S}
    assert nginx_text(ends).splitlines()[1:] == [
        "deny 192.0.2.7; # until 2027-01-15T08:00:00Z",
        "deny 2001:db8::/64; # until 2027-01-15T08:00:00Z",
    ]
    assert plain_text({V4: NOW_S}).splitlines()[1:] == ["192.0.2.7 # until 2027-01-15T08:00:00Z"]


@pytest.mark.server
def test_nft_accepts_the_table(tmp_path: Path) -> None:
    """Empty, and with entries of both versions."""
    nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    assert nft, "nft is not installed; as root on Debian or Ubuntu: apt-get install nftables"
    path = tmp_path / "blocked.nft"
    many = {ip_network(f"10.0.{n // 256}.{n % 256}"): NOW_S for n in range(300)}
    for ends in ({}, {V4: NOW_S}, {V6: NOW_S}, {V4: NOW_S, V6: NOW_S, **many}):
        path.write_text(nft_text(ends))
        checked = subprocess.run([nft, "-c", "-f", path], capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, b""), checked.stderr.decode()
    path.write_text(nft_text({V4: NOW_S}).replace("192.0.2.7", "192.0.2.777"))
    assert subprocess.run([nft, "-c", "-f", path], capture_output=True, check=False).returncode


def test_a_file_of_another_author_is_not_replaced(tmp_path: Path) -> None:
    """The configuration of a gateway must not be overwritten by mistake."""
    path = tmp_path / "nginx.conf"
    path.write_text("http {}\n")
    with stub_service(200, answer()) as service:
        found = run("blocklist", "--output", str(path), url=service.url)
    assert (found.exit_code, "was not written by this command" in found.output) == (2, True)
    assert path.read_text() == "http {}\n"


def test_the_command_runs_after_a_change_only(tmp_path: Path) -> None:
    """And its failure is an error."""
    path, mark = tmp_path / "blocked", tmp_path / "mark"
    for _ in range(2):
        update(path, "one", ["touch", str(mark)])
        assert mark.exists() is (_ == 0)
        mark.unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="--reload ended with 1"):
        update(path, "two", ["false"])
    with pytest.raises(ConfigError, match=r"--reload failed: .*nonsense"):
        update(path, "three", ["/nonsense"])
    assert path.read_text() == "three"
    update(path, "three", ["touch", str(mark)], again=True)
    assert mark.exists()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """And no temporary file."""
    path = tmp_path / "blocked"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\ud800")
    assert [each.name for each in tmp_path.iterdir()] == ["blocked"]
    assert path.read_text() == "old"
    replace_file(path, "new")
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_file_is_written(tmp_path: Path) -> None:
    """With the entries of the service; the threshold is passed on."""
    path = tmp_path / "blocked.conf"
    arguments = ("--format", "nginx", "--output", str(path), "--at-least", "50")
    with stub_service(200, answer(("192.0.2.7", 0.0))) as service:
        found = run("blocklist", *arguments, url=service.url, TOKEN="rk_1")
    assert found.exit_code == 0, found.output
    assert "deny 192.0.2.7; # until " in path.read_text()
    assert service.received[0].target == "/v1/admin/rejected?at_least=50"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "pf"], "--format pf is not nginx, nft or plain"),
        (["--max", "0"], "--max 0 is not between 1 and 100,000"),
        (["--follow"], "--follow and --reload need a file"),
        (["--expire", "soon"], "--expire 'soon' is not a duration"),
        (["--output", "x", "--follow", "--interval", "0.1s"], "is shorter than 1 s"),
    ],
)
def test_wrong_options(arguments: list[str], words: str) -> None:
    """Exit code 2, and the message names the option."""
    with stub_service(200, answer()) as service:
        found = run("blocklist", *arguments, url=service.url)
    assert (found.exit_code, words in found.output) == (2, True), found.output
