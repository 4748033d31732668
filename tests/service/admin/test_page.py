"""The page at /docs: files of this service only, and nothing inline."""

from __future__ import annotations

from html.parser import HTMLParser

from ratekeeper.service.admin import page
from ratekeeper.service.http.static_files import console_files
from tests.service.admin.client import Admin, admin, template

__all__ = ["admin", "template"]  # fixtures, found by name


class Seen(HTMLParser):
    """The tags of a page, their attributes, and the text in scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.attributes: set[str] = set()
        self.inline = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the references and the names of all attributes."""
        self.attributes.update(name for name, _ in attrs)
        self.references += [str(value) for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        """Record what a script or style contains."""
        if self.cdata_elem:
            self.inline += data


async def test_the_page_refers_to_files_of_this_service_only(admin: Admin) -> None:
    """Each is served; scripts and styles are files, so the policy needs no exception."""
    answer = await admin.client.get("/docs")
    assert answer.headers["content-security-policy"] == page.POLICY
    seen = Seen()
    seen.feed(answer.text)
    assert not seen.inline
    assert not any(name == "style" or name.startswith("on") for name in seen.attributes)
    seen.references.remove("/openapi.json")
    assert len(seen.references) == 5
    for url in seen.references:
        assert (await console_files().reply("GET", url, {})).status == 200, url


def test_the_policy_names_no_other_host() -> None:
    """Only this origin, and the icons inside the style sheet."""
    sources = {word for part in page.POLICY.split("; ") for word in part.split()[1:]}
    assert sources == {"'none'", "'self'", "data:"}
