"""`tollkeeper metrics`: the alerts and the dashboard."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.test_main import run


def test_alerts() -> None:
    """YAML with one group; each alert has a summary and a runbook."""
    result = run("metrics", "alerts")
    assert result.exit_code == 0
    (group,) = yaml.safe_load(result.stdout)["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/metrics.md#{rule['alert'].lower()}"


def test_links_to_runbooks() -> None:
    """--runbooks replaces all links, also in the tests of the alerts."""
    for options in ([], ["--tests"]):
        result = run("metrics", "alerts", *options, "--runbooks", "https://wiki.example.com/tk")
        assert result.exit_code == 0
        assert "runbook_url: docs/" not in result.stdout
        assert "https://wiki.example.com/tk#tollkeeperdegraded" in result.stdout


@pytest.mark.parametrize("url", ["wiki", "https://a b", "https://a#b", 'https://a"', "https://{{a"])
def test_link_that_would_break_the_file_is_rejected(url: str) -> None:
    """The message has an example."""
    result = run("metrics", "alerts", "--runbooks", url)
    assert result.exit_code == 2
    assert "https://wiki.example.com/tollkeeper" in result.output


def test_tests_of_the_alerts() -> None:
    """An operator who changes a threshold can run them."""
    result = run("metrics", "alerts", "--tests")
    assert yaml.safe_load(result.stdout)["rule_files"] == ["alerts.yaml"]


def test_dashboard() -> None:
    """JSON that Grafana imports: panels, and a variable for the data source."""
    result = run("metrics", "dashboard")
    assert result.exit_code == 0
    dashboard = json.loads(result.stdout)
    assert dashboard["schemaVersion"] >= 36
    names = [each["name"] for each in dashboard["templating"]["list"]]
    assert names == ["datasource", "job", "instance"]
    assert len({each["id"] for each in dashboard["panels"]}) == len(dashboard["panels"]) > 20
