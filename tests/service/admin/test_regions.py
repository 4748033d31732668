"""The regions over HTTP: status, and changes of the shares."""

from __future__ import annotations

from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path
from typing import cast

import pytest

from ratekeeper.core.errors import ChangeRefused, StoreUnavailable
from ratekeeper.rules.document.reading import read
from tests.service.admin.client import RULES, Admin, admin, admin_of, filled, template
from tests.stub_regions import StubRegions, store_with_regions

__all__ = ["admin", "template"]  # fixtures, found by name


@pytest.fixture
async def regional(tmp_path: Path) -> AsyncIterator[Admin]:
    """Yield the admin API of a node in the region eu, with a database for the audit."""
    url = f"sqlite:///{tmp_path}/rules.db"
    await filled(url)
    async with admin_of(tmp_path, read(RULES), url, store=store_with_regions()) as found:
        yield found


def stub(admin: Admin) -> StubRegions:
    """Return the regions of the limiter's store."""
    return cast("StubRegions", admin.context.limiter.regions)


async def test_a_service_without_regions_has_none(admin: Admin) -> None:
    """The list is empty, and a change names the option."""
    assert (await admin.call("GET", "/regions")).json() == {"region": None, "regions": []}
    problem = await admin.rejected("DELETE", "/regions/us", 409)
    assert problem["error"]["code"] == "NO_REGIONS"
    assert "--region" in problem["detail"]


async def test_the_status_of_all_regions(regional: Admin) -> None:
    """Each region has its leader, shares and links; one that cannot be read says why."""
    found = (await regional.call("GET", "/regions")).json()
    assert found["region"] == "eu"
    eu, us, ap = found["regions"]
    links = eu.pop("links")
    assert eu == {
        "region": "eu",
        "this_region": True,
        "leader": "eu-1/4711",
        "age_seconds": 0.4,
        "problem": "",
        "epoch": 3,
        "share": 0.4,
        "target_share": None,
        "backlog": 12,
        "unaccepted_units": 40,
        "excess_units": 7,
    }
    assert links[1] == {
        "peer": "ap",
        "state": "down",
        "problem": "no answer within 1 s",
        "lag_seconds": 8.5,
        "heard_seconds": 9.25,
        "clock_offset_seconds": None,
    }
    assert (us["this_region"], us["target_share"]) == (False, 0.5)
    assert (ap["leader"], ap["age_seconds"], ap["problem"]) == (None, None, "no answer within 2 s")


async def test_a_removed_region_leaves_its_share_to_the_others(regional: Admin) -> None:
    """In proportion to the table in use; the audit has the change with its author and reason."""
    answer = await regional.call("DELETE", "/regions/ap", headers={"X-Reason": "closed"})
    assert answer.json()["shares"] == {"eu": 0.5, "us": 0.5}
    assert stub(regional).changed == [{"eu": Fraction(1, 2), "us": Fraction(1, 2)}]
    entry = (await regional.call("GET", "/audit?kind=remove-region")).json()["items"][0]
    assert (entry["author"], entry["reason"], entry["key"]) == ("admin-token", "closed", "ap")


async def test_an_added_region_takes_its_share_of_the_others(regional: Admin) -> None:
    """A region that could not be reached is named, with the reason."""
    stub(regional).shares = {"eu": Fraction(1, 2), "us": Fraction(1, 2)}
    stub(regional).unreachable = {"us": "no answer within 2 s"}
    body = {"share": 0.2, "reason": "opened"}
    found = (await regional.call("PUT", "/regions/ap", json=body)).json()
    assert found["shares"] == {"ap": 0.2, "eu": 0.4, "us": 0.4}
    assert found["unreachable"] == {"us": "no answer within 2 s"}
    stub(regional).shares = {"eu": Fraction(1, 2), "us": Fraction(1, 2)}
    equal = (await regional.call("PUT", "/regions/ap", json={})).json()
    assert equal["shares"] == {"ap": 0.333333, "eu": 0.333333, "us": 0.333333}


async def test_all_shares_are_set(regional: Admin) -> None:
    """As exact fractions."""
    await regional.call("PUT", "/regions", json={"shares": {"eu": 1 / 3, "us": 2 / 3}})
    assert stub(regional).changed == [{"eu": Fraction(1, 3), "us": Fraction(2, 3)}]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("DELETE", "/regions/mars", None, 404, "ap, eu, us"),
        ("PUT", "/regions/mars", {"share": 0.1}, 404, "ap, eu, us"),
        ("PUT", "/regions/ap", {"share": 0.1}, 400, "has the share 1/5 already"),
        ("PUT", "/regions/ap", {"share": 0}, 400, "above 0"),
        ("PUT", "/regions", {"shares": {"eu": 0.5, "mars": 0.5}}, 404, "ap, eu, us"),
        ("PUT", "/regions", {"shares": {"eu": 0.5, "us": 0.4}}, 400, "add up"),
        ("PUT", "/regions", {"shares": {}}, 400, "shares"),
        ("PUT", "/regions", {"share": {"eu": 1}}, 400, "shares"),
    ],
)
async def test_a_change_that_makes_no_sense_is_rejected(
    regional: Admin,
    method: str,
    path: str,
    body: dict[str, object] | None,
    status: int,
    says: str,
) -> None:
    """The error names the known regions, or what is right. Nothing is changed."""
    problem = await regional.rejected(method, path, status, json=body)
    assert says in problem["detail"]
    assert stub(regional).changed == []


async def test_a_change_that_the_store_does_not_take_is_in_the_audit(
    regional: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second entry says that it failed."""

    async def fails(_: object) -> None:
        raise StoreUnavailable("the store of eu does not answer")

    monkeypatch.setattr(stub(regional), "change_shares", fails)
    await regional.rejected("DELETE", "/regions/ap", 503)
    kinds = [each["kind"] for each in (await regional.call("GET", "/audit")).json()["items"]]
    assert kinds[:2] == ["remove-region-failed", "remove-region"]


async def test_a_change_beside_another_one_is_a_conflict(
    regional: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client hears which change is in use; it is no defect of the service."""

    async def fails(_: object) -> None:
        raise ChangeRefused("another change of the shares was made at the same time: eu=1")

    monkeypatch.setattr(stub(regional), "change_shares", fails)
    problem = await regional.rejected("DELETE", "/regions/ap", 409)
    assert problem["error"]["code"] == "CHANGE_REFUSED"
    assert "eu=1" in problem["detail"]


async def test_regions_need_a_token(regional: Admin) -> None:
    """To read needs the role read, to change the role admin."""
    for role, status in (("read", 200), ("check", 403)):
        headers = {"Authorization": f"Bearer {regional.secrets[role]}"}
        await regional.call("GET", "/regions", status, headers=headers)
        for method, path, body in (
            ("DELETE", "/regions/ap", None),
            ("PUT", "/regions/ap", {}),
            ("PUT", "/regions", {"shares": {"eu": 1}}),
        ):
            await regional.rejected(method, path, 403, json=body, headers=headers)
    await regional.rejected("GET", "/regions", 401, headers={"Authorization": ""})
    assert stub(regional).changed == []
