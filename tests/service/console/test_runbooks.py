"""The pages of `console/runbooks.py`."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.metrics import operations
from ratekeeper.metrics.counters import MetricsSnapshot
from ratekeeper.metrics.operations.conditions import Held, Sample
from ratekeeper.service.console.runbooks import parsed
from tests.service.console.client import ConsoleClient


async def test_every_runbook_has_a_page(console: ConsoleClient) -> None:
    """With its steps as a list, code as code, and no Markdown left."""
    for alert in operations.runbooks():
        text = await console.get(f"/runbooks/{alert}")
        shown = re.sub(r"<code>.*?</code>", "", text[text.index("prose") :], flags=re.DOTALL)
        assert "<ol>" in shown
        assert not re.search(r"`|\*\*|\]\(", shown), shown


async def test_an_unknown_alert_has_no_page(console: ConsoleClient) -> None:
    """The error names it as text, and a path cannot reach another part of the admin API."""
    assert "is not an alert" in await console.get("/runbooks/Nothing", 404)
    text = await console.get("/runbooks/%3Cscript%3E", 404)
    assert "<script>" not in text.replace('<script src="', "")
    await console.get("/runbooks/..%2Frules", 404)


async def test_an_active_alert_leads_to_its_runbook(
    console: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the overview, in the list of all alerts and on the page of the runbook."""
    activity = console.context.activity
    held = Held("RatekeeperBreakerOpen", "<b>:6379", 2.0, activity.boot_s() - 100)
    sample = Sample(activity.boot_s(), activity.unix_s(), MetricsSnapshot(), [held])
    monkeypatch.setattr(activity, "last_sample", lambda: sample)
    for path in ("", "/runbooks", "/runbooks/RatekeeperBreakerOpen"):
        text = await console.get(path)
        assert ("Runbook of RatekeeperBreakerOpen" in text) == (not path.endswith("Open"))
        assert "&lt;b&gt;:6379" in text
        assert "<b>:6379" not in text
    assert "1 active alert<" in await console.get("")
    assert "Not active on this node." in await console.get("/runbooks/RatekeeperDegraded")


async def test_without_an_active_alert_the_overview_says_so(
    console: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it tells whether alerts have been evaluated at all."""
    activity = console.context.activity
    monkeypatch.setattr(activity, "last_sample", lambda: None)
    assert "Alerts are not evaluated yet" in await console.get("")
    sample = Sample(1.0, 1.0, MetricsSnapshot())
    monkeypatch.setattr(activity, "last_sample", lambda: sample)
    assert "No alert is active" in await console.get("")


@given(st.text(alphabet="ab `*[]()#-1.\n<&", max_size=80))
def test_nothing_of_a_text_is_lost(text: str) -> None:
    """Whatever the Markdown, all its letters are shown, in order."""
    shown = "".join(span.text for block in parsed(text) for item in block.items for span in item)
    letters = re.sub(r"[^ab]", "", re.sub(r"\]\([^)\s]+\)", "](", text))
    if "](" not in text and "```" not in text:
        assert re.sub(r"[^ab]", "", shown) == letters
