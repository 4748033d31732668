"""`tollkeeper top`: what a frame says, how it fits a terminal, and what a wrong answer does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.cli.answering import answering, run
from tests.redis_servers.ports import free_port
from tollkeeper.cli.scrape import read
from tollkeeper.cli.top_view import Frame, Sample, frame_of, view

URL = "http://127.0.0.1:8080"
READY: dict[str, Any] = {
    "status": "ready",
    "node": "web-1",
    "workers": 2,
    "rules": {"version": "abc", "age_seconds": 0.5, "error": ""},
    "store": {"healthy": True, "error": ""},
}


def metrics(allowed: int = 0, denied: int = 0, *, slow: int = 0, extra: str = "") -> str:
    return f"""
tollkeeper_checks_total{{outcome="allowed",rule="orders",source="store"}} {allowed}
tollkeeper_checks_total{{outcome="denied",rule="orders",source="store"}} {denied}
tollkeeper_checks_total{{outcome="unlimited",rule="(none)",source="none"}} {allowed}
tollkeeper_degraded_checks_total{{rule="orders"}} {denied}
tollkeeper_store_seconds_bucket{{le="0.001"}} {allowed}
tollkeeper_store_seconds_bucket{{le="0.01"}} {allowed + slow}
tollkeeper_store_seconds_bucket{{le="+Inf"}} {allowed + slow}
tollkeeper_store_errors_total{{kind="timeout"}} {denied}
tollkeeper_breaker_state{{node="10.0.0.5:6379"}} 0
tollkeeper_breaker_state{{node="10.0.0.6:6379"}} 2
tollkeeper_breaker_opened_total{{node="10.0.0.6:6379"}} 3
tollkeeper_rules_info{{version="abc"}} 1
tollkeeper_build_info{{version="1.2"}} 1
tollkeeper_store_states 850
tollkeeper_store_states_max 1000
tollkeeper_workers 2
{extra}"""


def frame(before: str, now: str, seconds: float = 2.0, **answers: Any) -> Frame:
    told = {"ready": READY, **answers}
    return frame_of(URL, Sample(10.0, read(before)), Sample(10.0 + seconds, read(now), **told))


def shown(found: Frame, width: int = 120, height: int = 30, note: str = "") -> list[str]:
    console = Console(width=width, height=height, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(view(found, height=height, width=width, note=note))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_rates_are_of_the_time_between() -> None:
    """By the second, whatever was counted before."""
    found = frame(metrics(1_000, 100), metrics(1_400, 120, slow=50))
    assert (found.allowed, found.denied, found.degraded, found.unruled) == (200, 10, 10, 200)
    (rule, *others) = found.rules
    assert (rule.rule, rule.allowed, rule.denied) == ("orders", 200, 10)
    assert not others
    assert found.store_errors == {"timeout": 10}


def test_latency_is_of_the_time_between() -> None:
    """What was slow an hour ago is not told for ever."""
    slow = frame(metrics(0), metrics(0, slow=100)).store
    assert slow.p50_s == pytest.approx(0.0055)
    quick = frame(metrics(0, slow=100), metrics(100, slow=100)).store
    assert quick.p99_s == pytest.approx(0.00099)
    assert frame(metrics(5), metrics(5)).store.p50_s is None


def test_a_service_that_was_started_again_has_no_negative_rates() -> None:
    """Its counts begin anew."""
    found = frame(metrics(1_000, 1_000, slow=9), metrics(10, 2))
    assert (found.allowed, found.denied) == (5, 1)


def test_breakers_tell_the_worst_first() -> None:
    """With how often they opened."""
    found = [(each.node, each.state, each.opened) for each in frame("", metrics()).breakers]
    assert found == [("10.0.0.6:6379", "open", 3), ("10.0.0.5:6379", "closed", 0)]


def test_workers_with_different_rules_are_told() -> None:
    """Both versions, and that they differ."""
    found = frame("", metrics(extra='tollkeeper_rules_info{version="def"} 1'))
    assert found.rules_version == "abc, def"
    assert "workers differ" in "\n".join(shown(found))


def test_what_is_wrong_is_in_the_frame() -> None:
    """A store that is away, rules that cannot be read, a full table."""
    ready = {
        **READY,
        "rules": {"version": "abc", "age_seconds": 90, "error": "limits.yaml:3:1: no"},
        "store": {"healthy": False, "error": "no answer in time"},
    }
    text = "\n".join(shown(frame("", metrics(denied=4), ready=ready)))
    for words in (
        *("limits.yaml:3:1: no", "confirmed 1.5 min ago", "away: no answer in time"),
        *("850 states of 1,000 (85%)", "2.0/s timeout", "10.0.0.6:6379 open (3 times opened)"),
    ):
        assert words in text, words


def test_keys_are_shown_beside_each_other() -> None:
    """Those checked most, and those denied most; without the list, nothing is."""
    most = {"items": [{"subject": ["user:42"], "rule": "orders", "per_second": 12.5}]}
    denied = {
        "items": [{"subject": ["api_key:sk\x1b[2J", "ip:1"], "rule": "orders", "per_second": 3}]
    }
    found = frame("", metrics(), checked_most=most, denied_most=denied)
    text = shown(found)
    assert text[-2].split() == ["CHECKED", "MOST", "RULE", "/S", "DENIED", "MOST", "RULE", "/S"]
    assert text[-1].split()[:3] == ["user:42", "orders", "12.5"]
    assert "\x1b" not in text[-1]
    assert "CHECKED MOST" not in "\n".join(shown(frame("", metrics())))


@pytest.mark.parametrize("width", [80, 100, 200])
def test_rates_of_keys_are_seen_however_long_the_keys_are(width: int) -> None:
    """On a terminal of 80 columns, too; wide characters are two of them."""
    names = [f"user:漢字漢字-{number}-" + "x" * 60 for number in range(3)]
    items = [
        {"subject": [name], "rule": "a-rule-with-a-long-name", "per_second": 12.5} for name in names
    ]
    found = frame(
        metrics(),
        metrics(),
        checked_most={"items": items},
        denied_most={"items": [{**each, "per_second": 0.25} for each in items]},
    )
    lines = [line for line in shown(found, width=width) if "user:" in line]
    assert len(lines) == 3
    for line in lines:
        assert "12.5" in line
        assert line.endswith("0.25")
        assert cell_len(line) <= width


@pytest.mark.parametrize("height", [10, 14, 20, 40])
@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_frame_fits_its_terminal(height: int, width: int) -> None:
    """However many rules and keys there are; the head of it is always there."""
    many = "\n".join(
        f'tollkeeper_checks_total{{outcome="denied",rule="rule-{number}",source="store"}} {number}'
        for number in range(200)
    )
    keys = {
        "items": [{"subject": ["x" * 400], "rule": "r" * 90, "per_second": 1} for _ in range(20)]
    }
    found = frame("", metrics(extra=many), checked_most=keys, denied_most=keys)
    lines = shown(found, width, height, note="as it was 3 s ago: nobody answers")
    assert len(lines) <= max(height, 14)  # of fewer lines, the terminal shows the first
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("service")
    assert lines[6].strip().startswith("as it was 3 s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--interval", "0"], "--interval 0 is not between 1 and 3600 seconds"),
        (["--interval", "nan"], "--interval nan is not between"),
        (["--timeout", "0"], "--timeout 0 is not between"),
        (["--url", "ftp://x"], "--url is not an address"),
    ],
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str], words: str) -> None:
    """And say what would be right."""
    result = run("top", "--once", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_nobody_there_is_exit_code_2() -> None:
    """As is somebody else; with --json it is told as JSON."""
    result = run("top", "--once", url=f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 2
    assert "cannot be asked" in result.stderr
    with answering(200, {"hello": "world"}) as service:
        result = run("top", "--json", url=service.url)
    assert result.exit_code == 2
    assert "not as Tollkeeper does" in json.loads(result.output)["error"]


def test_help_is_complete() -> None:
    """Every option, the exit codes, and an example to copy."""
    said = run("top", "--help").output
    for words in ("--once", "--json", "--interval", "--url", "--token", "Exit code: 0", "Example:"):
        assert words in said, words
