"""The limiter: the path of a check, for threads and for asyncio."""

from ratekeeper.limiter.async_limiter import AsyncLimiter
from ratekeeper.limiter.limiter import Limiter
from ratekeeper.limiter.reservations import Reservation

__all__ = ["AsyncLimiter", "Limiter", "Reservation"]
