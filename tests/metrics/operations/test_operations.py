"""The files for Prometheus and Grafana are in the package and can be read.

`tests/integration/test_alerts.py` runs the alerts with promtool.
"""

from __future__ import annotations

import json

import yaml

from tollkeeper.metrics import operations


def test_every_alert_has_a_test() -> None:
    """Each shipped alert is named in the shipped tests, and the tests name no other."""
    (group,) = yaml.safe_load(operations.read(operations.ALERTS))["groups"]
    tests = yaml.safe_load(operations.read(operations.ALERTS_TEST))["tests"]
    tested = {check["alertname"] for each in tests for check in each["alert_rule_test"]}
    assert tested == {rule["alert"] for rule in group["rules"]}


def test_the_dashboard_is_json() -> None:
    """Grafana imports the dashboard: it is JSON with a title and panels."""
    dashboard = json.loads(operations.read(operations.DASHBOARD))
    assert dashboard["title"]
    assert dashboard["panels"]
