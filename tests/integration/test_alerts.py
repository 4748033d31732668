"""The alerts, tested by promtool: each fires when it should, and not otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.prometheus_process import promtool
from tollkeeper.metrics import operations

ROOT = Path(__file__).parents[2]
RULES: list[dict[str, Any]] = yaml.safe_load(operations.alerts())["groups"][0]["rules"]
NAMES = [rule["alert"] for rule in RULES]
SHIPPED: dict[str, Any] = yaml.safe_load(operations.alert_tests())


def written(folder: Path, rules: list[dict[str, Any]], tests: list[dict[str, Any]]) -> str:
    """Write these alerts and tests, and return the path of the tests."""
    folder.mkdir(exist_ok=True)
    alerts = {"groups": [{"name": "tollkeeper", "rules": rules}]}
    (folder / operations.RULES_FILE).write_text(yaml.safe_dump(alerts), encoding="utf-8")
    path = folder / operations.ALERTS_TEST
    path.write_text(yaml.safe_dump({**SHIPPED, "tests": tests}), encoding="utf-8")
    return str(path)


def test_promtool_accepts_the_alerts_and_their_tests_pass(tmp_path: Path) -> None:
    """The shipped files: their syntax, and every test."""
    alerts = tmp_path / operations.ALERTS
    alerts.write_text(operations.alerts(), encoding="utf-8")
    checked = promtool("check", "rules", str(alerts))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = promtool("test", "rules", written(tmp_path, RULES, SHIPPED["tests"]))
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_tests_pass_with_other_thresholds_and_file_names(tmp_path: Path) -> None:
    """An operator prints both files with the same options, and names the rules file."""
    name = "a: b, #'\"]é.yaml"
    thresholds = {each: value * 0.37 for each, value in operations.DEFAULTS.items()}
    (tmp_path / name).write_text(operations.alerts(thresholds), encoding="utf-8")
    tests = tmp_path / "tests.yaml"
    tests.write_text(operations.alert_tests(thresholds, rules_file=name), encoding="utf-8")
    found = promtool("test", "rules", str(tests))
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("expr", ["vector(0) > 1", "vector(1)"], ids=["never", "always"])
def test_an_alert_that_never_or_always_fires_fails_its_test(expr: str, tmp_path: Path) -> None:
    """So each alert has a test that it fires, and one that it does not.

    One promtool runs all tests, each with the one alert that it is about.
    """
    paths = []
    for rule in RULES:
        of_it = [each for each in SHIPPED["tests"] if _alert(each) == rule["alert"]]
        paths.append(written(tmp_path / rule["alert"], [{**rule, "expr": expr}], of_it))
    found = promtool("test", "rules", *paths)
    assert found.returncode != 0
    failed = re.findall(r"^ *alertname: (\w+), time: ", found.stdout + found.stderr, re.MULTILINE)
    assert sorted(set(failed)) == sorted(NAMES)


def _alert(test: dict[str, Any]) -> str:
    """Return the name of the alert that a shipped test is about."""
    (name,) = {each["alertname"] for each in test["alert_rule_test"]}
    return str(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_a_runbook(name: str) -> None:
    """The anchor of its link is a heading of the page."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines()
    assert f"### {name}" in page
