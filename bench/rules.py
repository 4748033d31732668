"""Rules: matching among many of them, a whole check, and look-ups in long lists.

Each time is that of one call in nanoseconds: the median of batches, each timed as a whole, and the
99th percentile of calls timed one by one. Peers have no rules, so results are compared with the
goals of the design only.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

from bench.measure import SEED, Effort, collector_off
from ratekeeper import Limit, Limiter, Request
from ratekeeper.rules.document.model import Document, Match, Rule
from ratekeeper.rules.matching.lists import Lists
from ratekeeper.rules.matching.table import RuleTable

WORKS: Final = ("rules match", "rules check", "rules lists")
RULES: Final = (10, 1_000, 10_000)
ENTRIES: Final = 1_000_000
REQUESTS: Final = 4_000
GOAL_NS: Final = 1_000
FLOOR_NS: Final = 5_000
_LIMITS: Final = (Limit(1_000_000, per=1),)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """One work and the time of its call."""

    work: str
    p50_ns: float
    p99_ns: float
    goal: bool = False
    """True if the design has a goal for this work."""
    ratio: str = ""
    """The time compared with that of a plain check, and the goal of the design."""

    @property
    def verdict(self) -> str:
        """Return the result compared with the goal."""
        if not self.goal:
            return self.ratio
        if self.p50_ns <= GOAL_NS:
            return "goal"
        return "floor" if self.p50_ns <= FLOOR_NS else "behind"


def run_rules(
    wanted: Callable[[str], bool], effort: Effort, progress: Progress
) -> list[dict[str, Any]]:
    """Run the selected benchmarks, print results as they arrive, and return all numbers."""
    works = {"rules match": _matches, "rules check": _checks, "rules lists": _lists}
    found: list[Timed] = []
    for name, measure in works.items():
        if not wanted(name):
            continue
        if not found:
            print(_heading(), flush=True)
        progress(f"measuring {name} …")
        timed = measure(effort)
        progress("")
        print("\n".join(map(_line, timed)), flush=True)
        found += timed
    return [
        {"work": each.work, "p50_ns": each.p50_ns, "p99_ns": each.p99_ns, "verdict": each.verdict}
        for each in found
    ]


def _heading() -> str:
    return (
        f"\nrules: goal {GOAL_NS:,} ns for a match, floor {FLOOR_NS:,} ns\n"
        f"{'work':58}  {'p50 ns':>9}  {'p99 ns':>9}\n{'-' * 58}  {'-' * 9}  {'-' * 9}"
    )


def _line(timed: Timed) -> str:
    numbers = f"{timed.p50_ns:9,.0f}  {timed.p99_ns:9,.0f}"
    return f"{timed.work:58}  {numbers}  {timed.verdict}".rstrip()


def _timed(
    work: str,
    call: Callable[[Any], object],
    requests: Sequence[Any],
    effort: Effort,
    *,
    goal: bool = False,
) -> Timed:
    """Time calls on requests in a random order, none twice in a batch."""
    rng = random.Random(SEED)
    batches_ns: list[float] = []
    singly = array("q")
    for request in requests:
        call(request)
    for _ in range(effort.rounds):
        batches = [rng.sample(requests, k=effort.batch_calls) for _ in range(effort.batches)]
        sampled = rng.sample(requests, k=effort.sampled_calls)
        with collector_off():
            for batch in batches:
                start_ns = perf_counter_ns()
                for request in batch:
                    call(request)
                batches_ns.append((perf_counter_ns() - start_ns) / len(batch))
            for request in sampled:
                start_ns = perf_counter_ns()
                call(request)
                singly.append(perf_counter_ns() - start_ns)
    return Timed(work, median(batches_ns), sorted(singly)[len(singly) * 99 // 100], goal)


# ---------------------------------------------------------------------------------------- matching


def rules_of_an_api(count: int) -> list[Rule]:
    """Return rules like those of a large service: mostly paths, and some tenants and keys."""
    rules = []
    for number in range(count):
        service = number // 10
        match (number % 10, number):
            case ((0 | 1 | 2 | 3), _):
                conditions = Match(endpoint=(f"/v1/service{service}/items",), method=("GET",))
            case ((4 | 5 | 6), _):
                conditions = Match(endpoint=(f"/v1/service{service}/users/{{id}}/orders",))
            case 7, _:
                conditions = Match(endpoint=(f"/v1/service{service}/files/*",))
            case 8, _:
                conditions = Match(endpoint=("/v1/**",), tenant=(f"tenant{number}",))
            case _:
                conditions = Match(api_key=(f"sk_{number:05}_*",))
        by = ("user",) if number % 2 else ("tenant",)
        rules.append(Rule(f"rule{number}", by, _LIMITS, conditions))
    return rules


def requests_of_an_api(count: int, rules: int) -> list[Request]:
    """Return requests that match those rules, each with a different path."""
    rng = random.Random(SEED)
    return [
        Request(
            user=f"user{number}",
            api_key=f"sk_{rng.randrange(rules):05}_live",
            tenant=f"tenant{rng.randrange(rules)}",
            endpoint=f"/v1/service{rng.randrange(max(rules // 10, 1))}/users/{number}/orders",
            method="GET",
        )
        for number in range(count)
    ]


def _matches(effort: Effort) -> list[Timed]:
    found: list[Timed] = []
    for count in RULES:
        table = RuleTable(rules_of_an_api(count))
        requests = requests_of_an_api(REQUESTS, count)

        def match(request: Request, table: RuleTable = table) -> object:
            return table.match(table.read(request))

        found.append(_timed(f"match, {count:,} rules", match, requests, effort, goal=True))
    return found + [_of_kind(kind, patterns, effort) for kind, patterns in kinds().items()]


def kinds() -> dict[str, list[tuple[str, str]]]:
    """Return kinds of patterns, each as patterns with paths that match; `N` is a rule's number."""
    found = {
        "prefixes": [("/v1/serviceN/*", "/v1/serviceN/users/{}")],
        "suffixes": [("/v1/**/report-N", "/v1/{}/a/report-N")],
        "wildcards": [("/v1/serviceN/users/{id}/orders", "/v1/serviceN/users/{}/orders")],
        "wildcards within a segment": [("/v1/files/*-sN-*", "/v1/files/{}-sN-x")],
        "parts of words": [("/v1/files/*sNx*", "/v1/files/{}sNxy")],
        "** between": [("/v1/**/serviceN/**/orders", "/v1/eu/serviceN/users/{}/orders")],
        "re:": [("re:/v[0-9]+/sN/.*/orders-[a-z]+/x", "/v1/sN/users/{}/orders-a/x")],
        "re: and parts of words": [("re:/v[0-9]+/s[a-z]+-iN.*/.*", "/v1/sab-iNc/users/{}/orders")],
    }
    found["all kinds"] = [pair for pairs in found.values() for pair in pairs]
    return found


def _of_kind(kind: str, patterns: Sequence[tuple[str, str]], effort: Effort) -> Timed:
    """Measure 10,000 rules whose endpoints are of one kind, or of several."""
    rng = random.Random(SEED)
    pairs = [
        [text.replace("N", str(number)) for text in patterns[number % len(patterns)]]
        for number in range(RULES[-1])
    ]
    table = RuleTable(
        [
            Rule(f"rule{number}", ("user",), _LIMITS, Match(endpoint=(pattern,)))
            for number, (pattern, _) in enumerate(pairs)
        ]
    )
    paths = [rng.choice(pairs)[1].replace("{}", str(number)) for number in range(REQUESTS)]
    values = [table.values_of(Request(user="u", endpoint=path), None) for path in paths]
    return _timed(f"match, {RULES[-1]:,} rules: {kind}", table.match, values, effort)


def _checks(effort: Effort) -> list[Timed]:
    """Measure a whole check of a Request on memory://."""
    one = (Rule("api", ("user",), _LIMITS, Match(endpoint=("/v1/*",))),)
    two = (*one, Rule("tenants", ("tenant",), _LIMITS))
    documents = [
        ("check, 1 rule that applies", Document(one), 8),
        ("check, 2 rules that apply", Document(two), 14),
        ("check, 10,000 rules", Document(tuple(rules_of_an_api(10_000))), 0),
    ]
    requests = requests_of_an_api(REQUESTS, 10_000)
    keys = [str(request.user) for request in requests]
    found = []
    for name, document, goal in documents:
        # Beside each, so that both meet the same machine.
        plain = _timed("check, plain limit and key", Limiter(list(_LIMITS)).check, keys, effort)
        with Limiter.from_rules(document) as limiter:
            timed = _timed(name, limiter.check, requests, effort)
        ratio = f"{timed.p50_ns / plain.p50_ns:.1f} × plain" + (f" (goal {goal})" if goal else "")
        found += [plain, replace(timed, ratio=ratio)]
    return found


# ------------------------------------------------------------------------------------------- lists


def _lists(effort: Effort) -> list[Timed]:
    """Measure lists with a million entries each: exact keys, prefixes and networks."""
    entries = {
        "keys": [f"api_key:sk_revoked_{number}" for number in range(ENTRIES)],
        "prefixes": [f"api_key:sk_{number:06}_*" for number in range(ENTRIES)],
        "networks": [
            f"ip:{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}.0/24"
            for number in range(ENTRIES)
        ],
    }
    rng = random.Random(SEED)
    found = []
    for kind, texts in entries.items():
        lists = Lists.compile(deny=texts)
        texts.clear()
        chosen = [rng.randrange(ENTRIES) for _ in range(REQUESTS)]
        hits, misses = _listed(kind, chosen)
        found.append(_timed(f"list of {ENTRIES:,} {kind}, on it", lists.verdict, hits, effort))
        found.append(_timed(f"list of {ENTRIES:,} {kind}, not", lists.verdict, misses, effort))
    return found


def _listed(kind: str, numbers: Sequence[int]) -> tuple[list[Request], list[Request]]:
    """Return requests on the list, and others that are not."""
    if kind == "networks":
        addresses = [f"{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}.7" for n in numbers]
        others = [f"200.{n >> 8 & 255}.{n & 255}.7" for n in numbers]
        return [Request(ip=each) for each in addresses], [Request(ip=each) for each in others]
    key = "sk_revoked_{}" if kind == "keys" else "sk_{:06}_live"
    hits = [Request(api_key=key.format(number)) for number in numbers]
    return hits, [Request(api_key=f"pk_{number}_live") for number in numbers]
