"""Asking a running service over HTTP, for the command line: one question, one answer, or why not.

An answer is what the service said of the request, yes or no. Everything else that can come back is
an error that says what to do: nobody answers, somebody else answers, a token is missing. A refusal
by the rules and a refusal of the token may have the same status (403), so what counts is the body:
an answer on a request has the member `allowed`, and no error has it.

The token goes into one header and nowhere else. No message holds it, nor a password in a URL.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import SplitResult, urlsplit

from tollkeeper.core.errors import ConfigError, TollkeeperError, show

if TYPE_CHECKING:
    import httpx

URL_DEFAULT: Final = "http://127.0.0.1:8080"
TIMEOUT_S_MAX: Final = 600.0
# The quota of a request that meets thousands of rules; more than that is no answer of ours.
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
_DETAIL_CHARACTERS_MAX: Final = 500


class Unanswered(TollkeeperError):
    """The service gave no answer. `status` is that of what came instead, 0 if nothing did."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class Service:
    """A running service, asked one thing after another on one connection.

    Raises ConfigError for an address or a time that cannot be right, Unanswered for the rest.
    """

    def __init__(
        self, url: str, token: str | None, *, timeout_s: float, ca_file: str | None = None
    ) -> None:
        parts = _checked_url(url)
        if not 0 < timeout_s <= TIMEOUT_S_MAX:
            raise ConfigError(
                f"--timeout {timeout_s:g} is not between 0 and {TIMEOUT_S_MAX:g} seconds; try 5"
            )
        self.url: Final = parts.geturl().rstrip("/")
        self._timeout_s = timeout_s
        self._http = _httpx()
        self._client = self._http.Client(
            headers={"accept": "application/json", **_authorization(token)},
            timeout=timeout_s,
            verify=_trust(parts.scheme, ca_file),
            # A proxy of the environment's cannot reach what listens on this machine alone.
            trust_env=not _is_here(parts.hostname or ""),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        expected: str = "",
    ) -> dict[str, Any]:
        """What the service says, which has the `expected` member; without one, it may be empty."""
        until_s = monotonic() + self._timeout_s
        content = None if body is None else json.dumps(body).encode()
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            with self._client.stream(
                method, f"{self.url}{path}", params=query, content=content, headers=headers
            ) as response:
                text = self._read(response, until_s)
        except self._http.TimeoutException:
            raise self._too_slow() from None
        except self._http.HTTPError as error:
            raise self._unreachable(error) from None
        return self._understood(response, text, expected)

    def _read(self, response: httpx.Response, until_s: float) -> bytes:
        text = b""
        for piece in response.iter_bytes():
            text += piece
            if len(text) > ANSWER_BYTES_MAX:
                raise Unanswered(f"{self.url} sent more than {ANSWER_BYTES_MAX:,} bytes")
            # The client's own limit is on each read: a byte now and then would never end.
            if monotonic() > until_s:
                raise self._too_slow()
        return text

    def _understood(self, response: httpx.Response, text: bytes, expected: str) -> dict[str, Any]:
        if response.is_success and not (text or expected):
            return {}
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if isinstance(data, dict) and expected in data:
            return data
        detail = data.get("detail") or data.get("title") if isinstance(data, dict) else None
        raise Unanswered(self._complaint(response, detail), response.status_code)

    def _complaint(self, response: httpx.Response, detail: object) -> str:
        status = response.status_code
        said = f": {_one_line(detail)}" if isinstance(detail, str) else ""
        if status == 401:
            told = said or ": make one with `tollkeeper token create NAME --role check`"
            return f"{self.url} wants a token{told}. Here it is given in TOLLKEEPER_TOKEN"
        if status == 403:
            return f"the token may not do this{said}"
        if response.is_redirect:
            target = _one_line(response.headers.get("location", "elsewhere"))
            return f"{self.url} answers {status} and points to {target}; give that as --url"
        if said:
            return f"{self.url} answers {status}{said}"
        return (
            f"{self.url} answers {status}, but not as Tollkeeper does; "
            f"is --url (TOLLKEEPER_URL) the address of a `tollkeeper serve`?"
        )

    def _too_slow(self) -> Unanswered:
        return Unanswered(
            f"{self.url} did not answer within {self._timeout_s:g} s; --timeout allows it more"
        )

    def _unreachable(self, error: httpx.HTTPError) -> Unanswered:
        why = _one_line(str(error)) or type(error).__name__
        advice = "start it with `tollkeeper serve`, or say where it is with --url or TOLLKEEPER_URL"
        if "CERTIFICATE_VERIFY_FAILED" in why:
            advice = "name the file of those who signed its certificate with --ca"
        return Unanswered(f"{self.url} cannot be asked ({why}); {advice}")


def _httpx() -> Any:
    try:
        import httpx  # noqa: PLC0415 - an extra, which the other commands do without
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"to ask a service takes {error.name}, which is not installed; "
            f"install it with: pip install 'tollkeeper[client]'"
        ) from None
    return httpx


def _checked_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    # What is wrong is not repeated: it may hold a password.
    if not fine:
        raise ConfigError(f"--url is not an address of a service; try {URL_DEFAULT}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"--url has more in it than an address; try {URL_DEFAULT}, with the token in "
            f"TOLLKEEPER_TOKEN"
        )
    return parts


def _authorization(token: str | None) -> dict[str, str]:
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError("the token has characters that no token has; is all of it there, once?")
    return {"authorization": f"Bearer {token}"}


def _trust(scheme: str, ca_file: str | None) -> ssl.SSLContext | bool:
    if scheme != "https":
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"--ca {show(ca_file)} cannot be used: {error.strerror or 'no certificates in it'}"
        ) from None


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _one_line(text: str) -> str:
    """A stranger's words: short, on one line, and nothing that a terminal obeys."""
    words = "".join(each if each.isprintable() else " " for each in text[:_DETAIL_CHARACTERS_MAX])
    return " ".join(words.split())
