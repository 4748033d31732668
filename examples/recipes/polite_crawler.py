"""Crawl many sites quickly, and each of them politely.

The key is the host, so each site has its own pace. The wait is a hook of the HTTP client, which
also runs for redirects. The trap is to wait where URLs are chosen: a redirect to another host is
then an extra request that nothing counts, and a shortener in the list makes it thousands.

One task for each host keeps the crawl fast. Ten workers on one list of URLs would all end up
waiting for the same large site.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise

import httpx

from ratekeeper import AsyncLimiter
from ratekeeper.testing import ManualClock

clock = ManualClock()  # so that this program does not take half a minute; leave it out in real code
limiter = AsyncLimiter("1/second", clock=clock)  # one request, and the next a second later


async def pace(request: httpx.Request) -> None:
    await limiter.wait(request.url.host)


async def crawl(urls: list[str], client: httpx.AsyncClient) -> list[httpx.Response]:
    hosts: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        hosts[httpx.URL(url).host].append(url)

    async def crawl_host(pages: list[str]) -> list[httpx.Response]:
        return [await client.get(page) for page in pages]

    found = await asyncio.gather(*map(crawl_host, hosts.values()))
    return [response for responses in found for response in responses]


visits: dict[str, list[float]] = defaultdict(list)


def web(request: httpx.Request) -> httpx.Response:
    """Stand in for the web: short.test redirects to big.test."""
    visits[request.url.host].append(clock.now_ns() / 1e9)
    if request.url.host == "short.test":
        return httpx.Response(302, headers={"Location": f"http://big.test{request.url.path}"})
    return httpx.Response(200, text="page")


def client_of_the_web() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(web), follow_redirects=True)


def closest(times: list[float]) -> float:
    """Return the shortest time between two visits."""
    return min(after - before for before, after in pairwise(times))


async def main() -> None:
    urls = [f"http://{host}.test/{n}" for host in ("big", "small", "short") for n in range(5)]
    async with client_of_the_web() as client:
        client.event_hooks = {"request": [pace]}
        pages = await crawl(urls, client)
    assert [page.status_code for page in pages] == [200] * 15
    print("visits:", {host: len(times) for host, times in visits.items()})
    assert len(visits["big.test"]) == 10
    assert all(closest(times) >= 1 for times in visits.values())

    # The trap: the pace of the URL in the list, and not that of the request.
    visits.clear()
    async with client_of_the_web() as client:
        for url in (url for pair in zip(urls[:5], urls[10:], strict=True) for url in pair):
            await limiter.wait(("naive", httpx.URL(url).host))
            await client.get(url)
    print(f"paced by the list: big.test is visited again after {closest(visits['big.test']):g} s")
    assert closest(visits["big.test"]) < 1


if __name__ == "__main__":
    asyncio.run(main())
