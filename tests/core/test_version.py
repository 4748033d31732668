"""The version is the one that the package exports and that is installed."""

from __future__ import annotations

import importlib.metadata
import re

import ratekeeper
from ratekeeper.core.version import __version__


def test_there_is_one_version() -> None:
    """The module, the package and the installed metadata agree on three numbers."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert ratekeeper.__version__ == __version__
    assert importlib.metadata.version("ratekeeper") == __version__
