"""The fixtures of the tests of the console."""

from tests.service.admin.client import template
from tests.service.console.client import console

__all__ = ["console", "template"]
