"""What operators load into other programs: alerts for Prometheus, and a dashboard for Grafana.

`tollkeeper metrics alerts` and `tollkeeper metrics dashboard` print them. The alerts have tests
that promtool runs (`alerts_test.yaml`). Every metric that is named in them, the service tells.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

ALERTS: Final = "alerts.yaml"
ALERTS_TEST: Final = "alerts_test.yaml"
DASHBOARD: Final = "grafana.json"


def read(name: str) -> str:
    """One of the files, as it is shipped."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
