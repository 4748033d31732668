"""The files for Prometheus and Grafana are in the package and can be read.

`tests/integration/test_alerts.py` runs the alerts with promtool.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tollkeeper.core.errors import ConfigError
from tollkeeper.metrics import operations

ROOT = Path(__file__).parents[3]


def test_every_alert_has_a_test() -> None:
    """Each shipped alert is named in the shipped tests, and the tests name no other."""
    (group,) = yaml.safe_load(operations.alerts())["groups"]
    tests = yaml.safe_load(operations.alert_tests())["tests"]
    tested = {check["alertname"] for each in tests for check in each["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in group["rules"]}


def test_the_dashboard_is_json() -> None:
    """Grafana imports the dashboard: it is JSON with a title and panels."""
    dashboard = json.loads(operations.read(operations.DASHBOARD))
    assert dashboard["title"]
    assert dashboard["panels"]


def test_every_threshold_is_used_and_no_field_is_left() -> None:
    """A threshold that changed no alert would be a setting without effect."""
    before = operations.alerts()
    assert "@" not in before + operations.alert_tests()
    for each in operations.THRESHOLDS:
        changed = {**operations.DEFAULTS, each.name: each.default / 2}
        assert operations.alerts(changed) != before


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e12])
@pytest.mark.parametrize("threshold", operations.THRESHOLDS, ids=lambda each: each.name)
def test_a_threshold_that_makes_no_sense_is_rejected(
    threshold: operations.Threshold, value: float
) -> None:
    """The message names the option and its default."""
    option = f"--{threshold.name.replace('_', '-')} .* the default is {threshold.default:g}"
    with pytest.raises(ConfigError, match=option):
        operations.alerts({**operations.DEFAULTS, threshold.name: value})


@pytest.mark.parametrize("name", ["", "*.yaml", "a\nb", "rules[1].yaml"])
def test_a_rules_file_that_is_not_one_file_is_rejected(name: str) -> None:
    """Promtool would take some of these characters for a pattern."""
    with pytest.raises(ConfigError, match="not the path of one file"):
        operations.alert_tests(rules_file=name)


def test_the_runbooks_are_those_of_the_documentation() -> None:
    """The package ships no docs, so it has a copy. Change a runbook in both files."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    sections = page.split("\n### ")[1:]
    written = {name: text.strip() for name, _, text in (each.partition("\n") for each in sections)}
    assert operations.runbooks() == written
    assert list(operations.runbooks()) == list(written)
    assert sorted(operations.runbooks()) == sorted(operations.described())
    for each in operations.described().values():
        assert each.runbook == each.alert.lower()
