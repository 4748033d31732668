"""`tollkeeper metrics`: print the alerts and the dashboard that come with the package."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tollkeeper.cli.common import CliCommand, CliGroup
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.metrics import operations

# The link to the runbooks in the alerts; operators publish that page under another URL.
RUNBOOKS: Final = "docs/metrics.md"

app: Final = typer.Typer(
    cls=CliGroup,
    help="Print alerts for Prometheus and a dashboard for Grafana. The metrics are at /metrics.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command(cls=CliCommand)
def alerts(
    tests: Annotated[
        bool, typer.Option("--tests", help="Print the promtool tests of the alerts instead.")
    ] = False,
    runbooks: Annotated[
        str,
        typer.Option("--runbooks", metavar="URL", help="The URL of your copy of the runbooks."),
    ] = RUNBOOKS,
) -> None:
    """Print the alert rules for the `rule_files` of Prometheus.

    Example: tollkeeper metrics alerts > /etc/prometheus/tollkeeper.yaml

    Example: tollkeeper metrics alerts --runbooks https://wiki.example.com/tollkeeper
    """
    text = operations.read(operations.ALERTS_TEST if tests else operations.ALERTS)
    if runbooks != RUNBOOKS:
        _check_link(runbooks)
        text = text.replace(f"{RUNBOOKS}#", f"{runbooks}#")
    typer.echo(text, nl=False)


def _check_link(url: str) -> None:
    """Raise ConfigError if the URL would break the YAML file."""
    if not url.startswith(("http://", "https://")) or any(c in url for c in " \t\n\"'#{}"):
        raise ConfigError(
            f"--runbooks {show(url)} is not an http URL without an anchor; "
            f"for example https://wiki.example.com/tollkeeper"
        )


@app.command(cls=CliCommand)
def dashboard() -> None:
    """Print the dashboard for Grafana, as JSON to import. Grafana asks for the data source.

    Example: tollkeeper metrics dashboard > tollkeeper.json
    """
    typer.echo(operations.read(operations.DASHBOARD), nl=False)
