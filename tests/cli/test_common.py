"""What all commands share: durations, pairs, secrets, and options in groups."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from ratekeeper.cli.common import (
    CliCommand,
    hide_secrets,
    parse_duration_s,
    parse_pairs,
    seconds_text,
    with_options,
)
from ratekeeper.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5), ("90s", 90), ("1.5h", 5_400), ("7d", 604_800), ("10 m", 600)]
)
def test_duration(text: str, seconds: float) -> None:
    """A number and a unit; without a unit, it is in seconds."""
    assert parse_duration_s("--ttl", text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "1 fortnight", "1e9s", "9" * 400])
def test_invalid_duration(text: str) -> None:
    """The message has examples."""
    with pytest.raises(ConfigError, match=r"--ttl .* is not a duration; try 90s, 10m or 1h"):
        parse_duration_s("--ttl", text)


def test_pairs() -> None:
    """A value may contain an equals sign; a name may occur once."""
    assert parse_pairs("--scope", ["a=1", "b=c=d"], "a=1") == {"a": "1", "b": "c=d"}
    for given in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="--scope"):
            parse_pairs("--scope", given, "a=1")


def test_secrets_are_hidden() -> None:
    """URLs and tokens are replaced; other text stays."""
    text = "no such option redis://:s3cret@h and rk_abc-1, but tick"
    assert hide_secrets(text) == "no such option a URL and a token, but tick"


def test_seconds_have_three_digits() -> None:
    """Other values are unknown."""
    assert [seconds_text(each) for each in (0.25, 1234.5, "x")] == ["0.25 s", "1,234 s", "?"]


def test_options_in_groups() -> None:
    """A command gets the result of the function that declares the options."""

    def area(width: Annotated[int, typer.Option(help="The width.")], height: int = 2) -> int:
        return width * height

    @with_options(size=area)
    def show(size: int, name: str = "box") -> None:
        typer.echo(f"{name} {size}")

    app = typer.Typer()
    app.command(cls=CliCommand)(show)
    assert CliRunner().invoke(app, ["--width", "3", "--name", "x"]).output == "x 6\n"
    assert CliRunner().invoke(app, ["--name", "x"]).exit_code == 2
    assert "The width." in CliRunner().invoke(app, ["--help"]).output
