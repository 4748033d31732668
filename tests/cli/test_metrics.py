"""`ratekeeper metrics`: the alerts and the dashboard."""

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
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"


def test_links_to_runbooks() -> None:
    """--runbooks replaces all links, also in the tests of the alerts."""
    for options in ([], ["--tests"]):
        result = run("metrics", "alerts", *options, "--runbooks", "https://wiki.example.com/rk")
        assert result.exit_code == 0
        assert "runbook_url: docs/" not in result.stdout
        assert "https://wiki.example.com/rk#ratekeeperdegraded" in result.stdout


@pytest.mark.parametrize("url", ["wiki", "https://a b", "https://a#b", 'https://a"', "https://{{a"])
def test_link_that_would_break_the_file_is_rejected(url: str) -> None:
    """The message has an example."""
    result = run("metrics", "alerts", "--runbooks", url)
    assert result.exit_code == 2
    assert "https://wiki.example.com/ratekeeper" in result.output


@pytest.mark.parametrize("name", [None, "alerts.yaml", 'it\'s "ours".yml'])
def test_tests_of_the_alerts(name: str | None) -> None:
    """They name the rules file, whatever it is called."""
    result = run("metrics", "alerts", "--tests", *([] if name is None else ["--rules-file", name]))
    assert yaml.safe_load(result.stdout)["rule_files"] == [name or "ratekeeper.yaml"]


def test_thresholds_are_options() -> None:
    """Each changes the alerts and their tests; a wrong one is rejected."""
    result = run("metrics", "alerts", "--violations", "50", "--store-p99", "0.005")
    assert "> 50\n" in result.stdout
    assert "> 1000 * 0.005" in result.stdout
    result = run("metrics", "alerts", "--tests", "--violations", "50")
    assert "More than 50 checks a minute" in result.stdout
    result = run("metrics", "alerts", "--violations", "-1")
    assert result.exit_code == 2
    assert "--violations -1 is not above 0" in result.output


def test_dashboard() -> None:
    """JSON that Grafana imports: panels, and a variable for the data source."""
    result = run("metrics", "dashboard")
    assert result.exit_code == 0
    dashboard = json.loads(result.stdout)
    assert dashboard["schemaVersion"] >= 36
    names = [each["name"] for each in dashboard["templating"]["list"]]
    assert names == ["datasource", "job", "instance"]
    assert len({each["id"] for each in dashboard["panels"]}) == len(dashboard["panels"]) > 20
