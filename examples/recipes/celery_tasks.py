"""Limit Celery tasks without blocking the workers.

A task that is denied goes back to the broker and runs again when there is room: `retry` with the
decision's `retry_after`. The worker serves other tasks meanwhile. The trap is to wait inside of
the task (`limiter.wait`, `time.sleep`): a few tasks of one busy customer then occupy all workers.

- `max_retries=None`: to be limited is no failure. Celery gives up after three retries by default.
- All tasks that are denied at the same time would come back at the same time. A random part of the
  wait spreads them.
- With Redis or SQS as the broker, keep the countdown below the visibility timeout (an hour by
  default), otherwise the broker delivers the task a second time.
- Celery's own `rate_limit=` counts in each worker process by itself.
"""

from __future__ import annotations

import random
from queue import SimpleQueue

from celery import Celery, Task  # type: ignore[import-untyped]  # Celery ships no types
from celery.contrib.testing.worker import start_worker  # type: ignore[import-untyped]  # same

from ratekeeper import Limiter

app = Celery("shop", broker="memory://")  # "redis://…" in production
app.conf.broker_transport_options = {"polling_interval": 0.02}
limiter = Limiter("1/second", name="partner")  # store="shared://…" or "redis://…" in production
COUNTDOWN_MAX = 600
done: SimpleQueue[str] = SimpleQueue()
denials: list[str] = []


@app.task(bind=True, max_retries=None, ignore_result=True)  # type: ignore[untyped-decorator]  # same
def synchronise(self: Task, customer: str) -> None:
    decision = limiter.check(("customer", customer))
    if not decision:
        denials.append(customer)
        wait = decision.retry_after * random.uniform(1, 1.2)
        raise self.retry(countdown=min(wait, COUNTDOWN_MAX))
    done.put(customer)  # call the partner here


def main() -> None:
    # One worker with one slot, in this process; in production `celery --app shop worker`.
    options = {"pool": "solo", "perform_ping_check": False, "shutdown_timeout": 30}
    with start_worker(app, **options):
        for customer in ("busy", "busy", "quiet"):
            synchronise.delay(customer)
        order = [done.get(timeout=30) for _ in range(3)]
    print(f"the order of the tasks: {order}, after {len(denials)} denials")
    assert order == ["busy", "quiet", "busy"]  # the second busy task has not blocked the worker
    assert set(denials) == {"busy"}


if __name__ == "__main__":
    main()
