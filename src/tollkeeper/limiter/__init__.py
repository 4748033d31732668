"""The limiter: the path of a check, for threads and for asyncio."""

from tollkeeper.limiter.async_limiter import AsyncLimiter
from tollkeeper.limiter.limiter import Limiter

__all__ = ["AsyncLimiter", "Limiter"]
