"""`ratekeeper metrics`: print the alerts and the dashboard that come with the package."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Annotated, Final

import typer

from ratekeeper.cli.common import CliCommand, CliGroup, with_options
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.metrics import operations

app: Final = typer.Typer(
    cls=CliGroup,
    help="Print alerts for Prometheus and a dashboard for Grafana. The metrics are at /metrics.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _thresholds(**given: float) -> Mapping[str, float]:
    """Return the thresholds of the alerts; each is an option of the command."""
    return given


# `with_options` reads the options from the signature.
_thresholds.__signature__ = Signature(  # type: ignore[attr-defined]  # inspect reads it
    [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=Annotated[
                float,
                typer.Option(
                    f"--{each.name.replace('_', '-')}", metavar="NUMBER", help=f"Alert: {each.help}"
                ),
            ],
        )
        for each in operations.THRESHOLDS
    ]
)


@app.command(cls=CliCommand)
@with_options(thresholds=_thresholds)
def alerts(
    thresholds: Mapping[str, float],
    tests: Annotated[
        bool, typer.Option("--tests", help="Print the promtool tests of the alerts instead.")
    ] = False,
    rules_file: Annotated[
        str,
        typer.Option("--rules-file", metavar="FILE", help="With --tests: the alerts to test."),
    ] = operations.RULES_FILE,
    runbooks: Annotated[
        str,
        typer.Option("--runbooks", metavar="URL", help="The URL of your copy of the runbooks."),
    ] = operations.RUNBOOKS,
) -> None:
    """Print the alert rules for the `rule_files` of Prometheus.

    An alert fires above its threshold. Give the same thresholds with --tests.

    Example: ratekeeper metrics alerts > /etc/prometheus/ratekeeper.yaml

    Example: ratekeeper metrics alerts --violations 5000 --store-p99 0.005

    Example: ratekeeper metrics alerts --runbooks https://wiki.example.com/ratekeeper

    Example: ratekeeper metrics alerts --tests --rules-file alerts.yaml > alerts_test.yaml
    """
    if runbooks != operations.RUNBOOKS:
        _check_link(runbooks)
    if tests:
        typer.echo(operations.alert_tests(thresholds, runbooks, rules_file), nl=False)
    else:
        typer.echo(operations.alerts(thresholds, runbooks), nl=False)


def _check_link(url: str) -> None:
    """Raise ConfigError if the URL would break the YAML file."""
    if not url.startswith(("http://", "https://")) or any(c in url for c in " \t\n\"'#{}"):
        raise ConfigError(
            f"--runbooks {show(url)} is not an http URL without an anchor; "
            f"for example https://wiki.example.com/ratekeeper"
        )


@app.command(cls=CliCommand)
def dashboard() -> None:
    """Print the dashboard for Grafana, as JSON to import. Grafana asks for the data source.

    Example: ratekeeper metrics dashboard > ratekeeper.json
    """
    typer.echo(operations.read(operations.DASHBOARD), nl=False)
