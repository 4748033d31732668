"""`ratekeeper top`: the content of a frame, its size, and wrong answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from ratekeeper.cli.service_client import read_metrics
from ratekeeper.cli.top import ServiceSample, TopFrame, frame_of, view
from tests.cli.stub_service import run, stub_service
from tests.redis_servers.ports import free_port
from tests.service.http.client import http_service

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
ratekeeper_checks_total{{outcome="allowed"}} {allowed}
ratekeeper_checks_total{{outcome="denied"}} {denied}
ratekeeper_checks_total{{outcome="unlimited"}} {allowed}
ratekeeper_degraded_checks_total {denied}
ratekeeper_busiest_subject_rate {allowed / 10}
ratekeeper_rule_decisions_total{{outcome="allowed",rule="orders",source="store"}} {allowed}
ratekeeper_rule_decisions_total{{outcome="denied",rule="orders",source="store"}} {denied}
ratekeeper_rule_failures_total{{rule="orders"}} {denied}
ratekeeper_store_seconds_bucket{{le="0.001"}} {allowed}
ratekeeper_store_seconds_bucket{{le="0.01"}} {allowed + slow}
ratekeeper_store_seconds_bucket{{le="+Inf"}} {allowed + slow}
ratekeeper_store_errors_total{{kind="timeout"}} {denied}
ratekeeper_breaker_state{{server="10.0.0.5:6379"}} 0
ratekeeper_breaker_state{{server="10.0.0.6:6379"}} 2
ratekeeper_breaker_opened_total{{server="10.0.0.6:6379"}} 3
ratekeeper_rules_info{{version="abc"}} 1
ratekeeper_build_info{{version="1.2"}} 1
ratekeeper_store_states 850
ratekeeper_store_states_max 1000
ratekeeper_store_log_bytes 750
ratekeeper_store_log_bytes_max 1000
ratekeeper_workers 2
{extra}"""


def frame(before: str, now: str, seconds: float = 2.0, **answers: Any) -> TopFrame:
    later = {"ready": READY, **answers}
    return frame_of(
        URL,
        ServiceSample(10.0, read_metrics(before)),
        ServiceSample(10.0 + seconds, read_metrics(now), **later),
    )


def shown(found: TopFrame, width: int = 120, height: int = 30, note: str = "") -> list[str]:
    console = Console(width=width, height=height, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(view(found, height=height, width=width, note=note))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_rates_are_of_the_interval() -> None:
    """Rates are per second and ignore counts from before the interval."""
    found = frame(metrics(1_000, 100), metrics(1_400, 120, slow=50))
    assert (found.allowed, found.denied, found.degraded, found.unruled) == (200, 10, 10, 200)
    (rule, *others) = found.rules
    assert (rule.rule, rule.allowed, rule.denied) == ("orders", 200, 10)
    assert not others
    assert found.store_errors == {"timeout": 10}
    assert "busiest subject 140/s" in "\n".join(shown(found))


async def test_a_request_is_one_check_however_many_rules_apply() -> None:
    """Of 147 requests that three rules apply to, 132 are denied."""
    limits = {"user": "15/hour", "tenant": "1000/hour", "endpoint": "1000/hour"}
    rules = [{"id": name, "by": [name], "limits": [limit]} for name, limit in limits.items()]
    async with http_service(rules={"version": 1, "rules": rules}) as http:
        before = (await http("GET", "/metrics")).body.decode()
        for _ in range(147):
            await http.check(user="1", tenant="t", endpoint="/")
        now = (await http("GET", "/metrics")).body.decode()
    found = frame(before, now, seconds=1.0)
    assert (found.allowed, found.denied) == (15, 132)
    assert "15.0/s allowed, 132/s denied (89.8%)" in "\n".join(shown(found))


def test_latency_is_of_the_interval() -> None:
    """A slow call an hour ago does not show any more."""
    slow = frame(metrics(0), metrics(0, slow=100)).store
    assert slow.p50_s == pytest.approx(0.0055)
    quick = frame(metrics(0, slow=100), metrics(100, slow=100)).store
    assert quick.p99_s == pytest.approx(0.00099)
    assert frame(metrics(5), metrics(5)).store.p50_s is None


def test_restarted_service_has_no_negative_rates() -> None:
    """Its counters start at zero again."""
    found = frame(metrics(1_000, 1_000, slow=9), metrics(10, 2))
    assert (found.allowed, found.denied) == (5, 1)


def test_open_breakers_come_first() -> None:
    """Each line has the number of times that the breaker opened."""
    found = [(each.server, each.state, each.opened) for each in frame("", metrics()).breakers]
    assert found == [("10.0.0.6:6379", "open", 3), ("10.0.0.5:6379", "closed", 0)]


def test_workers_with_different_rules() -> None:
    """The frame shows both versions and a warning that they differ."""
    found = frame("", metrics(extra='ratekeeper_rules_info{version="def"} 1'))
    assert found.rules_version == "abc, def"
    assert "workers differ" in "\n".join(shown(found))


def test_problems_are_shown() -> None:
    """The frame shows a store that is not healthy, unreadable rules, a full table and full logs."""
    ready = {
        **READY,
        "rules": {"version": "abc", "age_seconds": 90, "error": "limits.yaml:3:1: no"},
        "store": {"healthy": False, "error": "no answer in time"},
    }
    text = "\n".join(shown(frame("", metrics(denied=4), ready=ready)))
    for words in (
        *("limits.yaml:3:1: no", "confirmed 1.5 min ago", "not healthy: no answer in time"),
        *("850 states of 1,000 (85%)", "logs 75%", "2.0/s timeout"),
        "10.0.0.6:6379 open (opened 3 times)",
    ):
        assert words in text, words


def test_busiest_keys() -> None:
    """The two lists are side by side; without records, the frame has neither."""
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
def test_long_keys_do_not_hide_their_rates(width: int) -> None:
    """Long keys are cut even with 80 columns; a wide character takes two columns."""
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
def test_frame_fits_its_terminal(height: int, width: int) -> None:
    """The head is always shown, for any number of rules and keys."""
    many = "\n".join(
        f'ratekeeper_rule_decisions_total{{outcome="denied",rule="rule-{number}"}} {number}'
        for number in range(200)
    )
    keys = {
        "items": [{"subject": ["x" * 400], "rule": "r" * 90, "per_second": 1} for _ in range(20)]
    }
    found = frame("", metrics(extra=many), checked_most=keys, denied_most=keys)
    lines = shown(found, width, height, note="as it was 3 s ago: no answer")
    assert len(lines) <= max(height, 14)  # a lower terminal shows the first lines
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("service")
    assert lines[6].strip().startswith("as it was 3 s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--interval", "0"], "--interval 0 is not between 1 and 3600 seconds"),
        (["--interval", "nan"], "--interval nan is not between"),
        (["--timeout", "0"], "--timeout 0 is not between"),
        (["--url", "ftp://x"], "--url is not an http or https URL"),
    ],
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str], words: str) -> None:
    """The message says what would be right."""
    result = run("top", "--once", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_unreachable_service_is_exit_code_2() -> None:
    """So is another program at the URL; with --json the message is JSON."""
    result = run("top", "--once", url=f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 2
    assert "cannot be reached" in result.stderr
    with stub_service(200, {"hello": "world"}) as service:
        result = run("top", "--json", url=service.url)
    assert result.exit_code == 2
    assert "not as Ratekeeper does" in json.loads(result.output)["error"]


def test_help_is_complete() -> None:
    """It has every option, the exit codes, and an example."""
    text = run("top", "--help").output
    for words in ("--once", "--json", "--interval", "--url", "--token", "Exit code: 0", "Example:"):
        assert words in text, words


def test_the_hit_rate_of_a_fleet() -> None:
    """The share of the interval that the node answered without a call; no line without a fleet."""
    counts = """
ratekeeper_fleet_checks_total{{rule="a",consistency="leased",outcome="allowed"}} {allowed}
ratekeeper_fleet_checks_total{{rule="a",consistency="leased",outcome="denied"}} {denied}
ratekeeper_fleet_checks_total{{rule="b",consistency="eventual",outcome="asked"}} {asked}
ratekeeper_fleet_live_nodes 3
ratekeeper_fleet_pending_units 1234
"""
    before = metrics(extra=counts.format(allowed=100, denied=10, asked=1_000))
    now = metrics(extra=counts.format(allowed=240, denied=40, asked=1_030))
    found = frame(before, now)
    assert (found.fleet_nodes, found.fleet_answered, found.fleet_asked) == (3, 85, 15)
    line = "3 nodes; 85.0% of 100/s answered in the node; 1,234 units pending"
    assert line in "\n".join(shown(found))
    idle = frame(now, now)
    assert "3 nodes; no checks of leased or eventual rules" in "\n".join(shown(idle))
    assert not [line for line in shown(frame("", metrics())) if line.startswith("fleet")]
