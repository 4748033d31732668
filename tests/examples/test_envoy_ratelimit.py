"""The guide for envoyproxy/ratelimit: its rules decide as the configuration does, and its numbers.

The decisions of envoyproxy/ratelimit in this module come from its documentation.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ratekeeper import Limiter
from ratekeeper.cli.main import app
from ratekeeper.rules.document.reading import read
from ratekeeper.service.envoy.descriptors import request_of
from ratekeeper.service.process import startup
from ratekeeper.testing import ManualClock
from tests.service.envoy.client import codes, entries, grpc_client, serving

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/migrate/envoy-ratelimit"
GUIDE = (ROOT / "docs/migrate/envoy-ratelimit.md").read_text()
AFTER = (EXAMPLE / "after.yaml").read_text()

# Descriptors, the calls with each, and how many of them envoyproxy/ratelimit lets pass.
CALLS: list[tuple[list[tuple[str, str]], int, int]] = [
    ([("remote_address", "192.0.2.7")], 12, 10),
    ([("remote_address", "192.0.2.8")], 12, 10),
    ([("remote_address", "10.1.2.3")], 12, 12),
    ([("remote_address", "203.0.113.9")], 1, 0),
    ([("plan", "gold"), ("path", "/v1/orders")], 102, 100),
    ([("plan", "gold"), ("path", "/v1/search")], 102, 100),
    ([("plan", "free"), ("path", "/v1/orders")], 7, 5),
    ([("plan", "new"), ("path", "/v1/orders")], 7, 5),
    ([("plan", "free"), ("path", "/v1/search/all")], 7, 7),
    ([("export", "report-1"), ("tenant", "acme")], 30, 30),
    ([("export", "report-2"), ("tenant", "acme")], 30, 20),
    ([("export", "other"), ("tenant", "acme")], 3, 3),
    ([("plan", "free")], 7, 7),
    ([("path", "/v1/orders"), ("plan", "free")], 7, 7),
]


async def test_the_rules_of_the_example_decide_as_the_configuration() -> None:
    """Envoy's calls to the service get the replies that they got before."""
    async with serving(AFTER, clock=ManualClock()) as server, grpc_client(server.target) as ask:
        for descriptor, count, passes in CALLS:
            replies = [await ask(entries(*descriptor), domain="shop") for _ in range(count)]
            expected = ["OK"] * passes + ["OVER_LIMIT"] * (count - passes)
            assert [codes(reply)[0] for reply in replies] == expected, descriptor


def test_the_guide_shows_the_example_as_it_is() -> None:
    """Both files, apart from their first lines, which name the guide."""
    for name in ("before", "after"):
        _, _, text = (EXAMPLE / f"{name}.yaml").read_text().partition("\n")
        assert f"```yaml\n{text}```" in GUIDE


def test_every_limit_in_the_table_is_valid() -> None:
    """The text of each `limits` and `match` in the table is accepted in a rule document."""
    table = GUIDE[GUIDE.index("## Each construct") : GUIDE.index("## The settings")]
    shown = re.findall(r"`((?:limits|match|attributes|ip|by|cost|mode|deny): [^`]+)`", table)
    assert len(shown) > 10
    for text in shown:
        field = dict(yaml.safe_load(text))
        if "ip" in field or "attributes" in field:
            field = {"match": field}
        rule = {"id": "a", "by": [], "limits": ["1/s"], **field}
        deny = rule.pop("deny", [])
        read(yaml.safe_dump({"version": 1, "rules": [rule], "deny": deny}))


def document(*rules: str) -> str:
    """Return a document; each rule counts by the key that is its id."""
    return "version: 1\nrules:\n" + "".join(
        f'- {{id: {key}, match: {{attributes: {{descriptor_keys: {key}}}}}, by: [{key}], '
        f'limits: ["{limit}"]}}\n'
        for key, limit in (rule.split(" ", 1) for rule in rules)
    )  # fmt: skip


def test_two_descriptors_in_one_call_are_charged_together_or_not_at_all() -> None:
    """The guide's numbers: of 10 calls, 5 pass; envoyproxy/ratelimit would have spent 10 of `b`."""
    text = document("a 5/minute fixed_window", "b 8/minute fixed_window")
    with Limiter.from_rules(text, clock=ManualClock()) as limiter:
        pair = [(request_of("shop", [(key, "1")]), 1) for key in "ab"]
        passed = [
            all(each.decision.allowed for each in limiter.evaluate_all(pair)) for _ in range(10)
        ]
        assert passed == [True] * 5 + [False] * 5
        assert limiter.evaluate(pair[1][0]).decision.remaining == 2


def test_a_denied_call_costs_nothing() -> None:
    """The guide's numbers: 8 of 10 are spent, 5 more do not fit, and 2 still do."""
    with Limiter.from_rules(document("a 10/minute fixed_window"), clock=ManualClock()) as limiter:
        request = request_of("shop", [("a", "1")])
        answers = [limiter.evaluate(request, units).decision.allowed for units in (8, 5, 2)]
        assert answers == [True, False, True]


@pytest.mark.parametrize(("limit", "passed"), [("10/minute fixed_window", 20), ("10/minute", 11)])
def test_a_token_bucket_has_no_edge(limit: str, passed: int) -> None:
    """The guide's numbers: 20 requests from 3 s before to 3 s after the full minute."""
    clock = ManualClock(57)
    with Limiter.from_rules(document(f"a {limit}"), clock=clock) as limiter:
        request = request_of("shop", [("a", "1")])
        answers = [limiter.evaluate(request).decision.allowed for _ in range(10)]
        clock.advance(6)
        answers += [limiter.evaluate(request).decision.allowed for _ in range(10)]
        assert sum(answers) == passed


def test_the_guide_opens_the_port_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command is accepted after the step before, and rejected without it: Envoy would go on."""
    create, serve = re.findall(r"`ratekeeper ((?:token create|serve) [^`]+)`", GUIDE)
    arguments = serve.replace("limits.yaml", str(EXAMPLE / "after.yaml"))
    arguments = arguments.replace("redis://…", "redis://127.0.0.1:1").split()
    started: list[object] = []
    monkeypatch.setattr(startup, "run", lambda settings: started.append(check(settings)))
    check, env = startup.check_access, {"RATEKEEPER_DATA": str(tmp_path)}
    assert "there is no token" in CliRunner().invoke(app, arguments, env=env).stderr
    assert CliRunner().invoke(app, create.split(), env=env).exit_code == 0
    assert CliRunner().invoke(app, arguments, env=env).exit_code == 0
    assert len(started) == 1
