"""Files for operators: alerts for Prometheus, and a dashboard for Grafana.

`ratekeeper metrics alerts` and `ratekeeper metrics dashboard` print them. The alerts have tests
that promtool runs (`alerts_test.yaml`), and link to docs/runbooks.md. The service exports every
metric that they use.

The alerts and their tests are templates. A field such as `@2*violations@` is a product of numbers
and thresholds; `@rejections%@` prints it as a percentage, `@store_p99ms@` in milliseconds, and
`@violations:.1f@` with one decimal. So the tests pass with any thresholds, if the same ones are
given for both files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from math import isfinite, prod
from typing import Final, NamedTuple

from ratekeeper.core.errors import ConfigError, show

ALERTS: Final = "alerts.yaml"
ALERTS_TEST: Final = "alerts_test.yaml"
DASHBOARD: Final = "grafana.json"
# The name of the alerts' file in their tests, and the page of the runbooks.
RULES_FILE: Final = "ratekeeper.yaml"
RUNBOOKS: Final = "docs/runbooks.md"

_FIELD: Final = re.compile(r"@([a-z0-9_.*]+?)(%|ms|:\.\df)?@")


class Threshold(NamedTuple):
    """A setting of the alerts: above the value, an alert fires."""

    name: str
    default: float
    most: float
    """The highest value; each value is above 0."""
    help: str


THRESHOLDS: Final = (
    Threshold("rejections", 0.2, 0.99, "Share of the checks that are denied."),
    Threshold("violations", 1_000, 1e9, "Denied checks per minute."),
    Threshold("subject_rate", 100, 1e9, "Checks per second of the busiest subject on a node."),
    Threshold("decision_p99", 0.01, 10, "Seconds that the slowest hundredth of checks takes."),
    Threshold("store_p99", 0.02, 10, "The same for the calls to one server of the store."),
    Threshold("clock_offset", 0.5, 1e6, "Seconds between the clocks of node and server."),
    Threshold("rules_age", 60, 1e6, "Seconds since the source of the rules last answered."),
    Threshold("restarts", 2, 1e6, "Workers started in 15 minutes."),
    Threshold("store_fullness", 0.8, 0.99, "Share of the store's states in use."),
    Threshold("log_fullness", 0.7, 0.99, "Share of the memory for sliding window logs in use."),
    Threshold("region_lag", 5, 1e6, "Seconds until another region learns of a total."),
    Threshold("excess", 1_000, 1e9, "Units over eventual limits in ten minutes."),
)
DEFAULTS: Final[Mapping[str, float]] = {each.name: each.default for each in THRESHOLDS}


def read(name: str) -> str:
    """Return the text of one of the files."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def alerts(thresholds: Mapping[str, float] = DEFAULTS, runbooks: str = RUNBOOKS) -> str:
    """Return the alerts as a rules file for Prometheus. Raises ConfigError.

    `runbooks` is the address of the page with the runbooks.
    """
    return _filled(ALERTS, thresholds, runbooks)


def alert_tests(
    thresholds: Mapping[str, float] = DEFAULTS,
    runbooks: str = RUNBOOKS,
    rules_file: str = RULES_FILE,
) -> str:
    """Return the tests of the alerts, for `promtool test rules`. Raises ConfigError.

    `rules_file` is the path of the alerts; promtool reads it from the folder of the tests.
    """
    if not rules_file or not rules_file.isprintable() or set(rules_file) & set("*?["):
        raise ConfigError(
            f"--rules-file {show(rules_file)} is not the path of one file; "
            f"for example {RULES_FILE}, the file with the printed alerts"
        )
    text = _filled(ALERTS_TEST, thresholds, runbooks)
    return text.replace(f"rule_files: [{RULES_FILE}]", f"rule_files: [{json.dumps(rules_file)}]")


def _filled(name: str, thresholds: Mapping[str, float], runbooks: str) -> str:
    for each in THRESHOLDS:
        value = thresholds[each.name]
        if not isfinite(value) or not 0 < value <= each.most:
            raise ConfigError(
                f"--{each.name.replace('_', '-')} {value:g} is not above 0 and at most "
                f"{each.most:g}; the default is {each.default:g}"
            )
    values = {
        **thresholds,
        # Halfway between the threshold and all, for the tests.
        "rejections_high": (1 + thresholds["rejections"]) / 2,
        "rejections_left": (1 - thresholds["rejections"]) / 2,
    }
    text = _FIELD.sub(lambda found: _field(found[1], found[2], values), read(name))
    return text.replace(f"{RUNBOOKS}#", f"{runbooks}#")


def _field(product: str, form: str | None, values: Mapping[str, float]) -> str:
    value = prod(
        values[factor] if factor in values else float(factor) for factor in product.split("*")
    )
    if form == "%":
        return f"{100 * value:.10g}%"
    if form == "ms":
        return f"{1_000 * value:.10g} ms"
    return f"{value:.10g}" if form is None else format(value, form[1:])
