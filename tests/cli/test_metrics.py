"""`tollkeeper metrics`: prints what is shipped."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.test_main import run


def test_alerts_are_printed_as_they_are_shipped() -> None:
    """YAML with one group, whose alerts say what is wrong and where to read on."""
    result = run("metrics", "alerts")
    assert result.exit_code == 0
    (group,) = yaml.safe_load(result.stdout)["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/metrics.md#{rule['alert'].lower()}"


def test_runbooks_are_where_the_reader_has_them() -> None:
    """All links, and in the tests too."""
    for options in ([], ["--tests"]):
        result = run("metrics", "alerts", *options, "--runbooks", "https://wiki.example.com/tk")
        assert result.exit_code == 0
        assert "runbook_url: docs/" not in result.stdout
        assert "https://wiki.example.com/tk#tollkeeperdegraded" in result.stdout


@pytest.mark.parametrize("url", ["wiki", "https://a b", "https://a#b", 'https://a"', "https://{{a"])
def test_a_link_that_would_break_the_file_is_refused(url: str) -> None:
    """With what a right one looks like."""
    result = run("metrics", "alerts", "--runbooks", url)
    assert result.exit_code == 2
    assert "https://wiki.example.com/tollkeeper" in result.output


def test_the_tests_of_the_alerts_are_printed() -> None:
    """Whoever changes a threshold can run them."""
    result = run("metrics", "alerts", "--tests")
    assert yaml.safe_load(result.stdout)["rule_files"] == ["alerts.yaml"]


def test_the_dashboard_is_printed() -> None:
    """JSON that Grafana imports: panels, and a variable for the data source."""
    result = run("metrics", "dashboard")
    assert result.exit_code == 0
    dashboard = json.loads(result.stdout)
    assert dashboard["schemaVersion"] >= 36
    names = [each["name"] for each in dashboard["templating"]["list"]]
    assert names == ["datasource", "job", "instance"]
    assert len({each["id"] for each in dashboard["panels"]}) == len(dashboard["panels"]) > 20
