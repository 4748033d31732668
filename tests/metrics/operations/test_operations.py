"""The files for Prometheus and Grafana are in the package and can be read.

`tests/integration/test_alerts.py` runs the alerts with promtool.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from ratekeeper.core.errors import ConfigError
from ratekeeper.metrics import operations
from ratekeeper.metrics.counters import FAMILIES, MetricFamily


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


PANELS: list[dict[str, Any]] = json.loads(operations.read(operations.DASHBOARD))["panels"]


def rows() -> dict[str, str]:
    """Return the queries of each row of the dashboard, as one text."""
    found: dict[str, str] = {}
    row = ""
    for panel in PANELS:
        row = panel["title"] if panel["type"] == "row" else row
        found[row] = found.get(row, "") + "".join(
            f"{each['expr']}\n" for each in panel.get("targets", ())
        )
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_metric_is_on_the_dashboard(family: MetricFamily) -> None:
    """Those of the fleet, of gossip and of regions in rows of their own."""
    begins = {"fleet": "Fleet", "gossip": "Fleet", "region": "Regions", "envoy": "Envoy"}
    row = begins.get(family.name.partition("_")[0])
    text = "".join(rows().values()) if row is None else rows()[row]
    assert re.search(rf"\b{family.full_name}(_bucket)?\b", text)


def test_the_overview_of_the_dashboard_shows_fleet_and_regions() -> None:
    """An operator sees at the top that a node is dead or a link is down."""
    for name in (
        *("fleet_live_nodes", "fleet_nodes", "fleet_pending_units"),
        *("region_link_state", "region_leader", "region_lag_seconds"),
    ):
        assert f"ratekeeper_{name}{{" in rows()["Overview"]


def test_the_panels_are_in_order_and_do_not_overlap() -> None:
    """Each has its own number and its own place, below the row that it belongs to."""
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    last = 0
    for panel in PANELS:
        at = panel["gridPos"]
        places = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not places & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        assert at["y"] >= last, panel["title"]
        taken |= places
        last = at["y"]


def test_every_query_is_of_the_chosen_job_and_instance() -> None:
    """The variables at the top of the dashboard apply to all panels."""
    for panel in PANELS:
        for target in panel.get("targets", ()):
            metrics = re.findall(r"ratekeeper_\w+(\{[^}]*\})?", target["expr"])
            assert metrics
            for labels in metrics:
                assert 'job=~"$job"' in labels
                assert 'instance=~"$instance"' in labels


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
