"""Ratekeeper: rate limits that are never exceeded, at the speed of local memory.

>>> from ratekeeper import Limiter
>>> limiter = Limiter("100/minute")
>>> limiter.check("user:42").remaining
99
"""

from ratekeeper.core.errors import (
    CapacityError,
    ConfigError,
    InvalidCost,
    InvalidKey,
    InvalidOption,
    LimitExceeded,
    RatekeeperError,
    RateSyntaxError,
    SlotLost,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.core.model import Decision, Limit, Request
from ratekeeper.core.rates import parse_limit, parse_limits
from ratekeeper.core.version import __version__
from ratekeeper.decide.failure import LocalFallback
from ratekeeper.decide.stores import open_store
from ratekeeper.fleet.settings import Fleet
from ratekeeper.limiter import AsyncLimiter, Limiter, Reservation
from ratekeeper.regions.settings import Regions

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
    "RatekeeperError",
    "Regions",
    "Request",
    "Reservation",
    "SlotLost",
    "StoreError",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "__version__",
    "open_store",
    "parse_limit",
    "parse_limits",
]
