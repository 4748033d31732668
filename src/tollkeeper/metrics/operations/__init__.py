"""Files for operators: alerts for Prometheus, and a dashboard for Grafana.

`tollkeeper metrics alerts` and `tollkeeper metrics dashboard` print them. The alerts have tests
that promtool runs (`alerts_test.yaml`). The service exports every metric that they use.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

ALERTS: Final = "alerts.yaml"
ALERTS_TEST: Final = "alerts_test.yaml"
DASHBOARD: Final = "grafana.json"


def read(name: str) -> str:
    """Return the text of one of the files."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
