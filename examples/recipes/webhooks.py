"""Send webhooks at the pace of each receiver, and let no slow receiver hold up the others.

Each receiver has a queue of its own and one task that empties it. `wait` keeps the receiver's
pace, also for repeated deliveries. A receiver that fails gets the same event again after a pause
that doubles each time, and its other events stay in order behind it.

The trap is one queue for all receivers: a receiver that does not answer blocks the events of all.
Receivers are URLs of your customers: limit how many each customer may register.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

from ratekeeper import AsyncLimiter

ATTEMPTS_MAX = 5
QUEUE_MAX = 1000  # a receiver that is away for long loses events, and not the memory of the sender
Send = Callable[[str, str], Awaitable[int]]


class Webhooks:
    """Deliveries to any number of receivers, each at its own pace."""

    def __init__(self, send: Send, limits: str = "10/second", pause: float = 1) -> None:
        self.send = send
        self.pause = pause
        self.limiter = AsyncLimiter(limits)  # store="redis://…" if several machines send
        self.queues: dict[str, asyncio.Queue[str]] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.lost: list[tuple[str, str]] = []

    def post(self, receiver: str, event: str) -> None:
        """Enqueue an event. Raises asyncio.QueueFull."""
        if receiver not in self.queues:
            self.queues[receiver] = asyncio.Queue(QUEUE_MAX)
            self.tasks.append(asyncio.create_task(self.deliver_to(receiver)))
        self.queues[receiver].put_nowait(event)

    async def deliver_to(self, receiver: str) -> None:
        queue = self.queues[receiver]
        while True:
            event = await queue.get()
            for attempt in range(ATTEMPTS_MAX):
                try:
                    await self.limiter.wait(receiver)
                    is_delivered = await self.send(receiver, event) < 300
                except Exception:  # any error, such as an invalid URL, or the task would end here
                    is_delivered = False
                if is_delivered:
                    break
                await asyncio.sleep(self.pause * 2**attempt)
            else:
                self.lost.append((receiver, event))  # store it, and tell the customer
            queue.task_done()


async def main() -> None:
    received: dict[str, list[str]] = defaultdict(list)
    broken = {"https://gone.test": ConnectionRefusedError(), "https://bad url": ValueError()}
    slow_answers = asyncio.Event()

    async def send(receiver: str, event: str) -> int:
        """Stand in for `httpx.AsyncClient.post`, with five kinds of receivers."""
        if receiver == "https://slow.test":
            await slow_answers.wait()
        if receiver in broken:
            raise broken[receiver]
        if receiver == "https://busy.test" and len(received[receiver]) < 2:
            received[receiver].append("503")
            return 503
        received[receiver].append(event)
        return 200

    webhooks = Webhooks(send, limits="200/second capacity 1", pause=0.001)
    for receiver in broken:
        webhooks.post(receiver, "order-0")
    for number in range(3):
        for receiver in ("https://slow.test", "https://fast.test", "https://busy.test"):
            webhooks.post(receiver, f"order-{number}")

    await webhooks.queues["https://fast.test"].join()
    assert received["https://fast.test"] == ["order-0", "order-1", "order-2"]
    assert received["https://slow.test"] == []  # it still has not answered
    print("fast.test has its events while slow.test has not answered yet")

    await webhooks.queues["https://busy.test"].join()
    assert received["https://busy.test"] == ["503", "503", "order-0", "order-1", "order-2"]

    slow_answers.set()
    await asyncio.gather(*(queue.join() for queue in webhooks.queues.values()))
    assert received["https://slow.test"] == received["https://fast.test"]
    print("lost:", webhooks.lost)
    assert sorted(webhooks.lost) == sorted((receiver, "order-0") for receiver in broken)


if __name__ == "__main__":
    asyncio.run(main())
