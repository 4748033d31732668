"""Import and export of entries over HTTP."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from ratekeeper.control.follow import TOPIC
from ratekeeper.service.admin import entry_files
from ratekeeper.testing import ManualClock
from tests.service.admin.client import Admin, admin, template
from tests.shared_memory import SharedMemory

__all__ = ["admin", "template"]  # fixtures, found by name

GOOD = "kind,subject,tier\n,user:1,pro\n,user:2,free\ndeny,203.0.113.0/24,\n"


async def test_what_is_imported_can_be_exported(admin: Admin) -> None:
    """In every format; a second import of the same file changes nothing."""
    made = (await admin.call("POST", "/entries/import", content=GOOD)).json()
    assert (made["entries"], made["changed"]) == (3, 3)
    for form in ("csv", "json", "jsonl"):
        file = await admin.call("GET", f"/entries/export?format={form}")
        assert f'filename="entries.{form}"' in file.headers["content-disposition"]
        again = await admin.call("POST", f"/entries/import?format={form}", content=file.content)
        assert (again.json()["entries"], again.json()["changed"]) == (3, 0)
    denied = (await admin.call("GET", "/entries/export?format=jsonl&kind=deny")).text
    assert denied == '{"kind": "deny", "subject": "203.0.113.0/24"}\n'


async def test_a_file_with_a_bad_line_changes_nothing(admin: Admin) -> None:
    """All bad lines are listed with their numbers, whether form or meaning is wrong."""
    bad = GOOD + ",nobody,pro\n,user:3,gold\n,user:1,pro\n"
    found = await admin.rejected("POST", "/entries/import", 422, content=bad)
    assert found["error"]["code"] == "INVALID_DOCUMENT"
    assert [each["line"] for each in found["problems"]] == [5, 6, 7]
    assert "does not name a user" in found["problems"][0]["message"]
    assert 'no tier "gold"' in found["problems"][1]["message"]
    assert "is given twice" in found["problems"][2]["message"]
    assert (await admin.call("GET", "/entries/export?format=jsonl")).text == ""


async def test_an_import_is_as_safe_as_a_single_change(admin: Admin) -> None:
    """An entry that matches everyone, and an id that is taken, are bad lines with their numbers."""
    found = await admin.rejected(
        "POST", "/entries/import", 422, content=GOOD + "deny,user:*,\nallow,0.0.0.0/0,\n"
    )
    assert [each["line"] for each in found["problems"]] == [5, 6]
    assert "every request with user is denied" in found["problems"][0]["message"]
    head = "kind,subject,id,multiply,until,reason\n"
    first = head + "override,user:1,launch,2,2h,why\n"
    await admin.call("POST", "/entries/import", content=first)
    taken = head + "override,user:2,other,2,2h,why\noverride,user:1,launch,3,2h,why\n"
    found = await admin.rejected("POST", "/entries/import", 422, content=taken)
    assert [each["line"] for each in found["problems"]] == [3]


async def test_an_import_is_announced(admin: Admin) -> None:
    """On the channel of the store, as a single change is."""
    channel = Mock()
    store = SharedMemory(ManualClock())
    store.channel = channel
    admin.context.limiter._store = store
    made = (await admin.call("POST", "/entries/import", content=GOOD)).json()
    channel.publish.assert_called_once_with(TOPIC, str(made["seq"]))


async def test_the_size_is_bounded(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer file is rejected before it is read."""
    monkeypatch.setattr(entry_files, "FILE_BYTES", 10)
    found = await admin.rejected("POST", "/entries/import", 413, content=GOOD)
    assert "at most 10 bytes" in found["detail"]


@pytest.mark.parametrize("query", ["format=xml", "force=true", "kind=deny", "replace=maybe"])
async def test_unknown_options_are_rejected(admin: Admin, query: str) -> None:
    """An import cannot be forced."""
    await admin.rejected("POST", f"/entries/import?{query}", 400, content=GOOD)
