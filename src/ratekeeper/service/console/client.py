"""AdminClient: calls the admin API in this process, with the rights of the operator.

The pages read and change data only through it, so the guarantees of the admin API hold for them:
roles, validation, conditions, the audit log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratekeeper.service.admin.operations import PREFIX
from ratekeeper.service.http.tokens import CALLER, Token

YAML: Final = "application/yaml"


class ApiProblem(Exception):
    """The admin API has rejected a call. `problem` is its problem JSON."""

    def __init__(self, status: int, problem: Mapping[str, Any], etag: str = "") -> None:
        self.status = status
        self.problem = problem
        self.etag = etag
        """The ETag of the newest version, after a conflict."""
        super().__init__(self.detail)

    @property
    def detail(self) -> str:
        """The description of the error, for people."""
        return str(self.problem.get("detail", f"the admin API answered {self.status}"))

    @property
    def code(self) -> str:
        """The code of the error, for programs."""
        return str(self.problem.get("error", {}).get("code", ""))


class AdminClient:
    """Calls the admin API for one operator."""

    def __init__(self, admin: ASGIApp, token: Token) -> None:
        async def with_caller(scope: Scope, receive: Receive, send: Send) -> None:
            scope[CALLER] = token
            await admin(scope, receive, send)

        self._admin: ASGIApp = with_caller
        # A defect is logged by the admin API, and its answer (500) becomes an ApiProblem.
        transport = httpx.ASGITransport(app=with_caller, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://console", trust_env=False
        )

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a GET, for example `get("/audit", author="ann")`. Raises ApiProblem.

        A parameter that is None or empty is left out. A name that is a Python keyword ends in an
        underscore: `from_`.
        """
        return (await self.call("GET", path, query=query)).json()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        data: Any = None,
        text: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> httpx.Response:
        """Call an operation with JSON (`data`) or a document (`text`). Raises ApiProblem."""
        given = _given(query or {})
        sent = dict(headers or {})
        if text is not None:
            sent["Content-Type"] = YAML
        response = await self._client.request(
            method,
            f"{PREFIX}{path}",
            params=given,
            json=data,
            content=None if text is None else text.encode("utf-8", "replace"),
            headers=[
                (name.encode("ascii"), value.encode() if isinstance(value, str) else value)
                for name, value in sent.items()
            ],
        )
        if response.status_code >= 400:
            raise ApiProblem(
                response.status_code, _problem(response), response.headers.get("etag", "")
            )
        return response

    def file(
        self,
        path: str,
        query: Mapping[str, Any],
        failed: Callable[[ApiProblem], Response],
    ) -> Response:
        """Return the reply to a GET as it is, while the admin API makes it: a file may be large.

        `failed` returns the reply if the admin API rejects the call.
        """
        return _File(self._admin, f"{PREFIX}{path}", _given(query), failed)


class _File(Response):
    """A reply that the admin API writes itself."""

    def __init__(
        self,
        admin: ASGIApp,
        path: str,
        query: Mapping[str, Any],
        failed: Callable[[ApiProblem], Response],
    ) -> None:
        super().__init__()
        self._admin, self._failed = admin, failed
        self._path, self._query = path, urlencode(query, doseq=True).encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the admin API, and pass its response on unless it is a problem."""
        status = 0
        rejected: list[bytes] = []

        async def passed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                rejected.append(message.get("body", b""))
            if status < 400:
                await send(message)

        names = ("type", "asgi", "http_version", "method", "scheme", "client", "server")
        inner = {name: scope[name] for name in names if name in scope}
        path = {"path": self._path, "raw_path": self._path.encode("ascii"), "root_path": ""}
        await self._admin(
            {**inner, **path, "query_string": self._query, "headers": []}, receive, passed
        )
        if status >= 400:
            found = httpx.Response(status, content=b"".join(rejected))
            await self._failed(ApiProblem(status, _problem(found)))(scope, receive, send)


def _given(query: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.rstrip("_"): str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
        if value is not None and value != ""
    }


def _problem(response: httpx.Response) -> Mapping[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def segment(text: str) -> str:
    """Return a text as one segment of a path: a subject may have slashes and question marks.

    >>> segment("user:a/b?c")
    'user%3Aa%2Fb%3Fc'
    """
    return quote(text, safe="")


def header_text(text: str) -> bytes:
    """Return a text as the value of a header such as X-Reason, which takes UTF-8 on one line."""
    return " ".join(text.split()).encode("utf-8", "replace")
