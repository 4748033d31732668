"""The alerts, tested by promtool: each fires when it should, and not otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratekeeper.metrics import operations
from tests.prometheus_process import promtool

ROOT = Path(__file__).parents[2]
RULES: list[dict[str, Any]] = yaml.safe_load(operations.alerts())["groups"][0]["rules"]
NAMES = [rule["alert"] for rule in RULES]
SHIPPED: dict[str, Any] = yaml.safe_load(operations.alert_tests())


def written(
    folder: Path, rules: list[dict[str, Any]], shipped: dict[str, Any] = SHIPPED
) -> list[str]:
    """Write each alert with its own tests, and return the paths of the tests.

    With all alerts in one file, promtool evaluates each of them for each test: eight seconds.
    """
    paths = []
    for rule in rules:
        place = folder / rule["alert"]
        place.mkdir()
        (rules_file,) = shipped["rule_files"]
        alerts = {"groups": [{"name": "ratekeeper", "rules": [rule]}]}
        (place / rules_file).write_text(yaml.safe_dump(alerts), encoding="utf-8")
        path = place / operations.ALERTS_TEST
        tests = [each for each in shipped["tests"] if _alert(each) == rule["alert"]]
        path.write_text(yaml.safe_dump({**shipped, "tests": tests}), encoding="utf-8")
        paths.append(str(path))
    assert {_alert(each) for each in shipped["tests"]} == {rule["alert"] for rule in rules}
    return paths


def test_promtool_accepts_the_alerts_and_their_tests_pass(tmp_path: Path) -> None:
    """The shipped files: their syntax, and every test."""
    alerts = tmp_path / operations.ALERTS
    alerts.write_text(operations.alerts(), encoding="utf-8")
    checked = promtool("check", "rules", str(alerts))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = promtool("test", "rules", *written(tmp_path, RULES))
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_tests_pass_with_other_thresholds_and_file_names(tmp_path: Path) -> None:
    """An operator prints both files with the same options, and names the rules file."""
    name = "a: b, #'\"]é.yaml"
    thresholds = {each: value * 0.37 for each, value in operations.DEFAULTS.items()}
    rules = yaml.safe_load(operations.alerts(thresholds))["groups"][0]["rules"]
    tests = yaml.safe_load(operations.alert_tests(thresholds, rules_file=name))
    found = promtool("test", "rules", *written(tmp_path, rules, tests))
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("expr", ["vector(0) > 1", "vector(1)"], ids=["never", "always"])
def test_an_alert_that_never_or_always_fires_fails_its_test(expr: str, tmp_path: Path) -> None:
    """So each alert has a test that it fires, and one that it does not."""
    rules = [{**rule, "expr": expr} for rule in RULES]
    found = promtool("test", "rules", *written(tmp_path, rules))
    assert found.returncode != 0
    failed = re.findall(r"^ *alertname: (\w+), time: ", found.stdout + found.stderr, re.MULTILINE)
    assert sorted(set(failed)) == sorted(NAMES)


def _alert(test: dict[str, Any]) -> str:
    """Return the name of the alert that a shipped test is about."""
    (name,) = {each["alertname"] for each in test["alert_rule_test"]}
    return str(name)


def test_every_alert_has_a_runbook() -> None:
    """The headings of the page are the anchors of the links, and there are no others."""
    page = (ROOT / operations.RUNBOOKS).read_text(encoding="utf-8")
    assert re.findall("^## (.+)$", page, re.MULTILINE) == NAMES


def test_the_dashboard_shows_fleet_and_regions_at_a_glance(tmp_path: Path) -> None:
    """Three nodes, one of which is dead to another; a link is down, and a region has no leader."""
    given = {
        'fleet_live_nodes{job="j", instance="a"}': 3,
        'fleet_nodes{job="j", instance="a", state="alive"}': 3,
        'fleet_nodes{job="j", instance="a", state="dead"}': 0,
        'fleet_nodes{job="j", instance="b", state="dead"}': 1,
        'fleet_nodes{job="j", instance="b", state="suspected"}': 0,
        'fleet_pending_units{job="j", instance="a"}': 5,
        'fleet_pending_units{job="j", instance="b"}': 2,
        'region_link_state{job="j", instance="a", region="eu", peer="us"}': 1,
        'region_link_state{job="j", instance="a", region="eu", peer="ap"}': 0,
        'region_link_state{job="j", instance="a", region="eu", peer="sa"}': 3,
        'region_link_state{job="j", instance="b", region="us", peer="eu"}': 2,
        'region_leader{job="j", instance="a", region="eu"}': 1,
        'region_leader{job="j", instance="b", region="eu"}': 0,
        'region_leader{job="j", instance="b", region="us"}': 0,
        'region_lag_seconds{job="j", instance="a", region="eu", peer="us"}': 8,
        'region_lag_seconds{job="j", instance="a", region="eu", peer="ap"}': 1,
    }
    expected = {
        "Nodes alive": 3,
        "Nodes not alive": 1,
        "Pending units": 7,
        "Links between regions not up": 2,
        "Regions without a leader": 1,
        "Longest lag between regions": 8,
    }
    panels = json.loads(operations.read(operations.DASHBOARD))["panels"]
    queries = {each["title"]: each["targets"][0]["expr"] for each in panels if "targets" in each}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f"ratekeeper_{name}", "values": f"{value}x3"}
            for name, value in given.items()
        ],
        "promql_expr_test": [
            {
                "expr": queries[title].replace("$job", ".*").replace("$instance", ".*"),
                "eval_time": "2m",
                "exp_samples": [{"labels": "{}", "value": value}],
            }
            for title, value in expected.items()
        ],
    }
    path = tmp_path / "dashboard_test.yaml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}), "utf-8")
    found = promtool("test", "rules", str(path))
    assert found.returncode == 0, found.stdout + found.stderr
