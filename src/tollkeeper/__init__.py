"""Tollkeeper: rate limits that are never exceeded, at the speed of local memory.

>>> from tollkeeper import Limiter
>>> limiter = Limiter("100/minute")
>>> limiter.check("user:42").remaining
99
"""

from tollkeeper._version import __version__
from tollkeeper.decide.stores import open_store
from tollkeeper.errors import (
    CapacityError,
    ConfigError,
    InvalidCost,
    InvalidKey,
    LimitExceeded,
    RateSyntaxError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    TollkeeperError,
)
from tollkeeper.limiter import Limiter
from tollkeeper.limiter_async import AsyncLimiter
from tollkeeper.model import Decision, Limit, Request
from tollkeeper.rates import parse_limit, parse_limits
from tollkeeper.standby import Standby

__all__ = [
    "AsyncLimiter",
    "CapacityError",
    "ConfigError",
    "Decision",
    "InvalidCost",
    "InvalidKey",
    "Limit",
    "LimitExceeded",
    "Limiter",
    "RateSyntaxError",
    "Request",
    "Standby",
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
