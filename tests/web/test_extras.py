"""Integrations whose library is missing: the error names the library and the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [("httpx", "httpx", "client"), ("flask", "flask", "flask"), ("django", "django", "django")],
)
def test_a_missing_library_is_explained(module: str, library: str, extra: str) -> None:
    """The message names the extra in a command that can be run."""
    program = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"from ratekeeper import ConfigError\n"
        f"try: import ratekeeper.{module}\n"
        f"except ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert library in done.stdout
    assert f"pip install 'ratekeeper[{extra}]'" in done.stdout


def test_the_wsgi_middleware_needs_no_extra() -> None:
    """It is part of the base install."""
    program = (
        "import sys\n"
        "for name in ('httpx', 'flask', 'django', 'asgiref', 'jwt', 'fastapi', 'starlette'):\n"
        "    sys.modules[name] = None\n"
        "from ratekeeper.wsgi import RateLimit\n"
        "RateLimit(lambda environ, start_response: [], '1/minute')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
