"""A client of a running service, for the commands that call one.

`ServiceClient.call` sends one request and returns the JSON object in the answer. Everything else
that can happen is a ServiceError whose message says what to do: the service cannot be reached, the
URL is that of another program, a token is missing. A denial by the rules and a rejected token can
have the same status (403), so the body decides: an answer to a check has the member `allowed`, and
no error has it.

The token goes into one header and nowhere else. No message contains it, nor a password in a URL.

`ServiceClient.metrics` reads `/metrics` with the Prometheus parser. Counters only grow while a
service runs. A counter that is lower than before was reset by a restart of the service, so its
whole value was counted since then.
"""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import ip_address
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self
from urllib.parse import SplitResult, urlsplit

import typer

from ratekeeper.cli.common import time_text
from ratekeeper.core.errors import ConfigError, RatekeeperError, show

if TYPE_CHECKING:
    import httpx

URL_DEFAULT: Final = "http://127.0.0.1:8080"
TIMEOUT_S: Final = 5.0
TIMEOUT_S_MAX: Final = 600.0
# Enough for the quota of a request to which thousands of rules apply.
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
_DETAIL_CHARACTERS_MAX: Final = 500
REASON_LENGTH_MAX: Final = 1_000

UrlOption = Annotated[
    str,
    typer.Option("--url", envvar="RATEKEEPER_URL", metavar="URL", help="The URL of the service."),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="RATEKEEPER_TOKEN",
        metavar="TEXT",
        help="The token, if the service requires one. Better use the variable: other users can see "
        "the arguments of a process. The token is never printed.",
    ),
]
CaOption = Annotated[
    str | None,
    typer.Option(
        "--ca",
        envvar="RATEKEEPER_CA",
        metavar="FILE",
        help="The CA certificate that signed the certificate of an https service. [default: those "
        "of the system]",
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        envvar="RATEKEEPER_TIMEOUT",
        metavar="SECONDS",
        help="How long to wait for an answer.",
    ),
]


class ServiceError(RatekeeperError):
    """The service did not answer the request. `status` is the HTTP status, 0 if there is none."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


def service_client(
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
) -> ServiceClient:
    """Return a client for the options of a command. Raises ConfigError."""
    return ServiceClient(url, token, timeout_s=timeout, ca_file=ca)


def service_opener(
    url: UrlOption = URL_DEFAULT,
    token: TokenOption = None,
    ca: CaOption = None,
    timeout: TimeoutOption = TIMEOUT_S,
) -> Callable[[], ServiceClient]:
    """Return a function that makes the client, for commands that may not need one."""
    return lambda: service_client(url, token, ca, timeout)


class ServiceClient:
    """Calls a running service, one request after another on one connection.

    Raises ConfigError for an invalid URL, token or timeout, and ServiceError for everything else.
    """

    def __init__(
        self, url: str, token: str | None, *, timeout_s: float, ca_file: str | None = None
    ) -> None:
        parts = checked_url(url)
        if not 0 < timeout_s <= TIMEOUT_S_MAX:
            raise ConfigError(
                f"--timeout {timeout_s:g} is not between 0 and {TIMEOUT_S_MAX:g} seconds; try 5"
            )
        self.url: Final = parts.geturl().rstrip("/")
        self._timeout_s = timeout_s
        self._http = _httpx()
        self._client = self._http.Client(
            headers=_authorization(token),
            timeout=timeout_s,
            verify=_trust(parts.scheme, ca_file),
            # A proxy from the environment cannot reach a service on this machine.
            trust_env=not _is_local(parts.hostname or ""),
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

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | Sequence[str]] | None = None,
        body: Mapping[str, Any] | None = None,
        expected: str = "",
        reason: str = "",
    ) -> dict[str, Any]:
        """Return the JSON object of the answer. It must have the member `expected`, if given.

        `reason` is that of a change, for the audit.
        """
        response, content = self._send(method, path, "application/json", query, body, reason)
        if response.is_success and not (content or expected):
            return {}
        try:
            data = json.loads(content)
        except (ValueError, RecursionError):
            data = None
        if isinstance(data, dict) and (expected in data or (response.is_success and not expected)):
            return data
        detail = data.get("detail") or data.get("title") if isinstance(data, dict) else None
        raise ServiceError(self._complaint(response, detail), response.status_code)

    def upload(
        self, path: str, parts: Iterable[bytes], query: Mapping[str, str], reason: str = ""
    ) -> dict[str, Any]:
        """Send a long body in parts, and return the JSON object of the answer."""
        headers = _headers("application/json", reason)
        try:
            response = self._client.post(
                f"{self.url}{path}",
                content=parts,
                params=query,
                headers=headers,
                timeout=TIMEOUT_S_MAX,
            )
            data = response.json()
        except self._http.HTTPError as error:
            raise self._unreachable(error) from None
        except ValueError:
            data = None
        if response.is_success and isinstance(data, dict):
            return data
        detail = data.get("detail") if isinstance(data, dict) else None
        raise ServiceError(self._complaint(response, detail), response.status_code)

    def download(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        """Yield a long answer in parts."""
        try:
            with self._client.stream(
                "GET", f"{self.url}{path}", params=query, timeout=TIMEOUT_S_MAX
            ) as response:
                if not response.is_success:
                    content = self._read(response, monotonic() + self._timeout_s)
                    data = json.loads(content) if content.startswith(b"{") else {}
                    raise ServiceError(
                        self._complaint(response, data.get("detail")), response.status_code
                    )
                yield from response.iter_bytes()
        except self._http.HTTPError as error:
            raise self._unreachable(error) from None

    def metrics(self) -> Scrape:
        """Return the metrics of the service."""
        response, content = self._send("GET", "/metrics", "text/plain")
        if response.is_success and b"ratekeeper_" in content:
            try:
                return read_metrics(content.decode(errors="replace"))
            except ValueError:
                pass
        raise ServiceError(self._complaint(response, None), response.status_code)

    def _send(
        self,
        method: str,
        path: str,
        accept: str,
        query: Mapping[str, str | Sequence[str]] | None = None,
        body: Mapping[str, Any] | None = None,
        reason: str = "",
    ) -> tuple[httpx.Response, bytes]:
        until_s = monotonic() + self._timeout_s
        headers = _headers(accept, reason)
        try:
            with self._client.stream(
                method, f"{self.url}{path}", params=query, json=body, headers=headers
            ) as response:
                return response, self._read(response, until_s)
        except self._http.TimeoutException:
            raise self._too_slow() from None
        except self._http.HTTPError as error:
            raise self._unreachable(error) from None

    def _read(self, response: httpx.Response, until_s: float) -> bytes:
        content = b""
        for piece in response.iter_bytes():
            content += piece
            if len(content) > ANSWER_BYTES_MAX:
                raise ServiceError(f"{self.url} sent more than {ANSWER_BYTES_MAX:,} bytes")
            # httpx limits the time of each read; an answer that arrives byte by byte has no limit.
            if monotonic() > until_s:
                raise self._too_slow()
        return content

    def _complaint(self, response: httpx.Response, detail: object) -> str:
        status = response.status_code
        reason = f": {one_line(detail)}" if isinstance(detail, str) else ""
        if status == 401:
            help_text = reason or ": create one with `ratekeeper token create NAME --role check`"
            return f"{self.url} requires a token{help_text}. Give it in RATEKEEPER_TOKEN"
        if status == 403:
            return f"the token does not allow this{reason}"
        if response.is_redirect:
            target = one_line(response.headers.get("location", "another URL"))
            return f"{self.url} answers {status} and redirects to {target}; give that as --url"
        if reason:
            return f"{self.url} answers {status}{reason}"
        return (
            f"{self.url} answers {status}, but not as Ratekeeper does; "
            f"is --url (RATEKEEPER_URL) the address of a `ratekeeper serve`?"
        )

    def _too_slow(self) -> ServiceError:
        return ServiceError(
            f"{self.url} did not answer within {self._timeout_s:g} s; raise --timeout to wait "
            f"longer"
        )

    def _unreachable(self, error: httpx.HTTPError) -> ServiceError:
        why = one_line(str(error)) or type(error).__name__
        advice = "start it with `ratekeeper serve`, or give its URL in --url or RATEKEEPER_URL"
        if "CERTIFICATE_VERIFY_FAILED" in why:
            advice = "give the CA certificate that signed its certificate in --ca"
        return ServiceError(f"{self.url} cannot be reached ({why}); {advice}")


def _headers(accept: str, reason: str) -> dict[str, bytes]:
    headers = {"accept": accept.encode()}
    if reason:
        headers["x-reason"] = one_line(reason, REASON_LENGTH_MAX).encode()
    return headers


def _httpx() -> Any:
    try:
        import httpx  # noqa: PLC0415 - an extra that other commands do not need
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"to call a service, the command needs {error.name}, which is not installed; "
            f"install it with: pip install 'ratekeeper[client]'"
        ) from None
    return httpx


def checked_url(url: str) -> SplitResult:
    """Return the parts of the URL of a service. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    # The URL is not repeated: it may contain a password.
    if not valid:
        raise ConfigError(f"--url is not an http or https URL; try {URL_DEFAULT}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"--url must not contain a user, a query or a fragment; try {URL_DEFAULT}, with the "
            f"token in RATEKEEPER_TOKEN"
        )
    return parts


def _authorization(token: str | None) -> dict[str, str]:
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError("the token contains characters that no token has; was it copied whole?")
    return {"authorization": f"Bearer {token}"}


def _trust(scheme: str, ca_file: str | None) -> ssl.SSLContext | bool:
    if scheme != "https":
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"--ca {show(ca_file)} cannot be used: {error.strerror or 'it has no certificates'}"
        ) from None


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def one_line(text: str, characters_max: int = _DETAIL_CHARACTERS_MAX) -> str:
    """Return text of another program on one line, cut, and without terminal escapes."""
    words = "".join(each if each.isprintable() else " " for each in text[:characters_max])
    return " ".join(words.split())


def json_objects(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a JSON list; none if the value is not a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def override_origin(source: object, override: object) -> str:
    """Return where limits come from; of an override with its reason, author and end.

    >>> override_origin("override user:42", {"reason": "launch", "until": "2030-01-31T00:00:00Z"})
    'override user:42 (launch, until 2030-01-31 00:00:00Z)'
    """
    parts: list[str] = []
    if isinstance(override, dict):
        parts = [one_line(str(override.get(name) or "")) for name in ("reason", "author")]
        if until := override.get("until"):
            with suppress(ValueError):
                parts.append(f"until {time_text(datetime.fromisoformat(str(until)))}")
    details = ", ".join(filter(None, parts))
    return f"{source or ''} ({details})" if details else str(source or "")


# ── Metrics ────────────────────────────────────────────────────────────────────────────────────

Labels = frozenset[tuple[str, str]]
# By upper bound in seconds: how many observations were at most that long. The last is infinite.
Buckets = dict[float, float]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The numbers of one scrape of /metrics, by name and labels."""

    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have these labels; 0 if there are none."""
        wanted = labels.items()
        return sum(
            value for has, value in self.values.get(name, {}).items() if wanted <= dict(has).items()
        )

    def value(self, name: str) -> float | None:
        """Return the value of a metric without labels; None if there is no such metric."""
        return self.values.get(name, {}).get(frozenset())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return sums by the values of one label, of the samples that have the other labels."""
        found: dict[str, float] = {}
        wanted = labels.items()
        for each, value in self.values.get(name, {}).items():
            has = dict(each)
            if label in has and wanted <= has.items():
                found[has[label]] = found.get(has[label], 0.0) + value
        return found

    def buckets(self, name: str) -> Buckets:
        """Return the buckets of a histogram."""
        return dict(sorted((float(le), n) for le, n in self.by(f"{name}_bucket", "le").items()))


def read_metrics(text: str) -> Scrape:
    """Parse the Prometheus text format. Raises ValueError. NaN is left out.

    >>> read_metrics('checks{rule="a",outcome="denied"} 3').by("checks", "rule")
    {'a': 3.0}
    """
    # Imported here: other commands do not need it.
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - see above

    values: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not math.isnan(sample.value):
                labels = frozenset(sample.labels.items())
                values.setdefault(sample.name, {})[labels] = sample.value
    return Scrape(values)


def growth(before: float, now: float) -> float:
    """Return by how much a counter grew; all of it if the counter was reset."""
    return now - before if now >= before else now


def bucket_growth(before: Buckets, now: Buckets) -> Buckets:
    """Return the observations between two scrapes of a histogram."""
    was_reset = any(now.get(bound, 0.0) < count for bound, count in before.items())
    if was_reset:
        return now
    return {bound: count - before.get(bound, 0.0) for bound, count in now.items()}


def quantile_s(buckets: Buckets, share: float) -> float | None:
    """Estimate a quantile as Prometheus does; None if there are no observations.

    Observations are taken to be spread evenly within a bucket. A quantile in the last bucket is
    reported as its lower bound.

    >>> quantile_s({0.001: 50.0, 0.002: 100.0, math.inf: 100.0}, 0.75)
    0.0015
    """
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    wanted = share * total
    below_s, below = 0.0, 0.0
    for bound_s, count in buckets.items():
        if count >= wanted and count > below:
            if math.isinf(bound_s):
                return below_s
            return below_s + (bound_s - below_s) * (wanted - below) / (count - below)
        below_s, below = bound_s, count
    return None
