"""`tollkeeper metrics`: the alerts and the dashboard that are shipped with the package."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tollkeeper.cli.rules_options import Command, Group
from tollkeeper.cli.rules_print import TROUBLE, telling
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.metrics import operations

# Where the alerts say that their runbooks are; a reader has that page somewhere else.
RUNBOOKS: Final = "docs/metrics.md"

app: Final = typer.Typer(
    cls=Group,
    help="What to load into Prometheus and Grafana. The service itself tells at /metrics.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command(cls=Command)
def alerts(
    tests: Annotated[
        bool, typer.Option("--tests", help="Print promtool's tests of the alerts instead.")
    ] = False,
    runbooks: Annotated[
        str,
        typer.Option(
            "--runbooks", metavar="URL", help="Where you keep the page that the alerts link to."
        ),
    ] = RUNBOOKS,
) -> None:
    """Print the alert rules for Prometheus, to be named in its `rule_files`.

    Example: tollkeeper metrics alerts > /etc/prometheus/tollkeeper.yaml

    Example: tollkeeper metrics alerts --runbooks https://wiki.example.com/tollkeeper
    """
    with telling(False, problems=TROUBLE):
        text = operations.read(operations.ALERTS_TEST if tests else operations.ALERTS)
        if runbooks != RUNBOOKS:
            _check_link(runbooks)
            text = text.replace(f"{RUNBOOKS}#", f"{runbooks}#")
        typer.echo(text, nl=False)


def _check_link(url: str) -> None:
    """It goes into YAML as it is."""
    if not url.startswith(("http://", "https://")) or any(c in url for c in " \t\n\"'#{}"):
        raise ConfigError(
            f"--runbooks {show(url)} is not a link without an anchor; "
            f"for example https://wiki.example.com/tollkeeper"
        )


@app.command(cls=Command)
def dashboard() -> None:
    """Print the dashboard for Grafana, as JSON to import; it asks for the data source.

    Example: tollkeeper metrics dashboard > tollkeeper.json
    """
    typer.echo(operations.read(operations.DASHBOARD), nl=False)
