"""The decisions in a text that Prometheus would scrape."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Decisions = dict[tuple[str, str, str], float]


def decisions(text: str, prefix: str) -> Decisions:
    """Return the decisions of the limiters whose names begin so, by name, endpoint and outcome."""
    return {
        (each.labels["rule"], each.labels["endpoint"], each.labels["outcome"]): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name == "ratekeeper_rule_decisions_total" and each.labels["rule"].startswith(prefix)
    }
