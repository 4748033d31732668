"""Tollkeeper: rate limits that are never exceeded, at the speed of local memory.

>>> from tollkeeper import Limiter
>>> limiter = Limiter("100/minute")
>>> limiter.check("user:42").remaining
99
"""

from tollkeeper.core.errors import (
    CapacityError,
    ConfigError,
    InvalidCost,
    InvalidKey,
    InvalidOption,
    LimitExceeded,
    RateSyntaxError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    TollkeeperError,
)
from tollkeeper.core.model import Decision, Limit, Request
from tollkeeper.core.rates import parse_limit, parse_limits
from tollkeeper.core.version import __version__
from tollkeeper.decide.failure import LocalFallback
from tollkeeper.decide.stores import open_store
from tollkeeper.fleet.settings import Fleet
from tollkeeper.limiter import AsyncLimiter, Limiter
from tollkeeper.regions.settings import Regions

__all__ = [
    "AsyncLimiter",
    "CapacityError",
    "ConfigError",
    "Decision",
    "Fleet",
    "InvalidCost",
    "InvalidKey",
    "InvalidOption",
    "Limit",
    "LimitExceeded",
    "Limiter",
    "LocalFallback",
    "RateSyntaxError",
    "Regions",
    "Request",
    "StoreError",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "TollkeeperError",
    "__version__",
    "open_store",
    "parse_limit",
    "parse_limits",
]
