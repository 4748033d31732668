"""The page Fleet and regions, on real nodes that gossip and share the Redis of a region."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.console.operators import PHONE, ConsoleService, Operator
from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.single import Single
from tests.service_process import ServiceProcess

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "users",
            "match": {"user": "*"},
            "by": ["user"],
            "limits": ["100000/hour"],
            "consistency": "leased",
        },
        {
            "id": "plan",
            "match": {"tenant": "*"},
            "by": ["tenant"],
            "limits": [{"limit": 1_000, "per": "365d", "algorithm": "fixed_window"}],
            "scope": "global",
            "across_regions": "exact",
        },
    ],
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServiceProcess]]:
    """Run two nodes of the region eu. The region us has a Redis and no node."""
    folder: Path = tmp_path_factory.mktemp("fleet")
    key = folder / "gossip.key"
    key.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    key.chmod(0o600)
    with ExitStack() as stack:
        table = []
        for region in ("eu", "us"):
            redis = stack.enter_context(Single())
            table += ["--regions", f"{region}={redis.uri}?deadline_ms=5000&connect_ms=5000"]
        addresses = [f"{HOST}:{free_port()}" for _ in range(2)]
        common = ["--region", "eu", *table, "--gossip-key", str(key), "--dead-seconds", "60"]
        first, second = (
            [*common, "--gossip", own, "--peers", other, "--node-id", name]
            for own, other, name in ((*addresses, "eu-1"), (*reversed(addresses), "eu-2"))
        )
        yield [
            stack.enter_context(ConsoleService(RULES, *first)),
            stack.enter_context(ServiceProcess(RULES, *second)),
        ]


@pytest.fixture
def service(nodes: list[ServiceProcess]) -> ServiceProcess:
    """Return the node whose console is open."""
    return nodes[0]


def test_a_node_that_dies_is_seen(operator: Operator, nodes: list[ServiceProcess]) -> None:
    """The page shows both nodes, local answers and both regions, and follows what happens."""
    assert isinstance(nodes[0], ConsoleService)
    operator.log_in("read")
    page = operator.open("/fleet")
    table = page.get_by_role("region", name="Nodes")
    other = table.get_by_role("row").filter(has_text=nodes_address(nodes[1]))
    # The page is never loaded again: all of this comes with its updates.
    expect(other).to_contain_text("alive")
    expect(table.get_by_role("row").filter(has_text="(this node)")).to_contain_text("eu-1")
    for number in range(30):
        assert nodes[0].check(user=f"u{number % 2}").status == 200
    answers = page.get_by_role("region", name="Checks that this node answers itself")
    expect(answers.get_by_role("row").filter(has_text="users")).to_contain_text("leased")
    links = page.get_by_role("region", name="Links between regions")
    expect(links.get_by_role("row").filter(has_text="eu")).to_have_count(1)
    expect(page.get_by_role("region", name="Regions", exact=True)).to_contain_text(
        "eu (this region)"
    )
    operator.check_accessibility()

    nodes[1].kill()
    expect(other).not_to_contain_text("alive")
    expect(page.get_by_role("heading", name="Look at this first")).to_be_visible()
    operator.check_accessibility()


def test_the_fleet_fits_on_a_phone(browser: Browser, service: ServiceProcess) -> None:
    """Wide tables are scrolled inside the page, also in dark colours."""
    phone = Operator(browser, service, viewport=PHONE, color_scheme="dark")
    phone.log_in()
    phone.open("/fleet")
    phone.check_width()
    phone.check_accessibility()
    phone.close()


def nodes_address(node: ServiceProcess) -> str:
    """Return the gossip address of a node."""
    command = node.command()
    return command[command.index("--gossip") + 1]
