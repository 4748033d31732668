"""Files for browsers: only the listed ones, compressed once, kept by browsers for ever."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ratekeeper.service.http import static_files
from ratekeeper.service.http.context import ServiceReply
from ratekeeper.service.http.static_files import StaticFiles, accepts_gzip, console_files
from tests.service.http.client import HttpClient, http_service

SCRIPT = "const é = 1;\n" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of known and other types, and a file beside it."""
    found = tmp_path / "static"
    (found / "vendor").mkdir(parents=True)
    (found / "a.js").write_text(SCRIPT)
    (found / "vendor/b.css").write_text("b{}")
    (found / "icon.svg").write_text("<svg/>")
    (found / "notes.txt").write_text("not for browsers")
    (tmp_path / "secret.js").write_text("secret")
    return found


async def got(
    files: StaticFiles, path: str, method: str = "GET", **headers: str
) -> tuple[ServiceReply, dict[str, str]]:
    """Return the reply to a request, and its headers."""
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    reply = await files.reply(method, path, sent)
    return reply, {name.decode(): value.decode() for name, value in reply.headers}


async def test_a_file_has_its_type_and_is_kept_for_ever(folder: Path) -> None:
    """Its URL changes with its content, so no browser asks twice."""
    files = StaticFiles(folder, "/s")
    reply, headers = await got(files, files.url("a.js"))
    assert (reply.status, reply.body.decode()) == (200, SCRIPT)
    assert headers["content-type"] == "text/javascript; charset=utf-8"
    assert headers["cache-control"] == "public, max-age=31536000, immutable"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"].startswith("default-src 'none'")
    before = files.url("a.js")
    (folder / "vendor/b.css").write_text("b{color:red}")
    assert StaticFiles(folder, "/s").url("a.js") != before


async def test_a_page_of_another_release_gets_the_file_of_this_one(folder: Path) -> None:
    """But the browser may not keep it under that URL."""
    files = StaticFiles(folder, "/s")
    reply, headers = await got(files, "/s/other/vendor/b.css")
    assert (reply.status, reply.body) == (200, b"b{}")
    assert headers["cache-control"] == "no-cache"


async def test_gzip_is_made_once_and_only_for_clients_that_accept_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other client gets the file itself."""
    files = StaticFiles(folder, "/s")
    url = files.url("a.js")
    reply, headers = await got(files, url, accept_encoding="gzip, deflate, br")
    assert headers["content-encoding"] == "gzip"
    assert headers["vary"] == "accept-encoding"
    assert gzip.decompress(reply.body).decode() == SCRIPT
    assert len(reply.body) < len(SCRIPT) / 5
    monkeypatch.setattr(static_files, "gzip", None)  # compressing again would raise
    again, _ = await got(files, url, accept_encoding="gzip")
    assert again.body == reply.body
    plain, headers = await got(files, url, accept_encoding="gzip;q=0, identity")
    assert plain.body.decode() == SCRIPT
    assert "content-encoding" not in headers


async def test_a_client_that_has_the_file_gets_no_body(folder: Path) -> None:
    """The ETag holds for both forms."""
    files = StaticFiles(folder, "/s")
    url = files.url("a.js")
    _, headers = await got(files, url)
    for known in (headers["etag"], headers["etag"].removeprefix("W/"), f'"x", {headers["etag"]}'):
        reply, _ = await got(files, url, if_none_match=known, accept_encoding="gzip")
        assert (reply.status, reply.body) == (304, b"")
    assert (await got(files, url, if_none_match='"x"'))[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/s",
        "/s/",
        "/s/v",
        "/s/v/",
        "/s/v/notes.txt",
        "/s/v/vendor",
        "/s/v/vendor/",
        "/s/v/../secret.js",
        "/s/v/../../secret.js",
        "/s/../secret.js",
        "/s/v/vendor/../a.js",
        "/s/v//a.js",
        "/s/v/A.JS",
        "/s/v/%61.js",
        "/s/v/a.js\0",
        "/s/v/{absolute}",
    ],
)
async def test_no_other_path_is_served(folder: Path, path: str) -> None:
    """A path is the name of a listed file, and nothing is read from the disk for it."""
    files = StaticFiles(folder, "/s")
    found = path.replace("{absolute}", str(folder / "a.js"))
    reply, _ = await got(files, found, accept_encoding="gzip")
    assert reply.status == 404
    (folder / "later.js").write_text("later")
    assert (await got(files, "/s/v/later.js"))[0].status == 404


async def test_other_methods_are_rejected(folder: Path) -> None:
    """HEAD has the headers of GET."""
    files = StaticFiles(folder, "/s")
    reply, headers = await got(files, files.url("a.js"), "POST")
    assert reply.status == 405
    assert headers["allow"] == "GET, HEAD"


def test_a_name_that_does_not_exist_has_no_url(folder: Path) -> None:
    """A template with a wrong name fails in its first test."""
    with pytest.raises(KeyError):
        StaticFiles(folder, "/s").url("b.js")


@pytest.mark.parametrize("value", [b"gzipped", b"x-gzip", b"gzip;q=0.000", b";q=1", b"gzip;q=x"])
def test_only_gzip_is_gzip(value: bytes) -> None:
    """A client that names another encoding gets the file itself."""
    assert not accepts_gzip(value)


async def test_the_service_serves_the_files_without_a_token() -> None:
    """A script of the console, with the headers of every reply; HEAD has no body."""
    url = console_files().url("vendor/htmx.js")
    async with http_service() as http:
        answer = await http("GET", url, b"", {"Accept-Encoding": "gzip"})
        assert answer.status == 200
        assert b"htmx" in gzip.decompress(answer.body)
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert answer.headers["x-request-id"]
        head = await http("HEAD", url, b"", {"Accept-Encoding": "gzip"})
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]
        await _is_not_found(http, f"{url}.map")
        await _is_not_found(http, "/console/static/x/../../app.py")


async def _is_not_found(http: HttpClient, path: str) -> None:
    answer = await http("GET", path)
    assert answer.status == 404
    assert answer.data["error"]["code"] == "NOT_FOUND"
