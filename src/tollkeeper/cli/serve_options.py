"""The options of `tollkeeper serve`: each is also an environment variable of the same name.

None means that nobody gave it, here or in the variable: then the --config file is looked at.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import typer

_PORT: Final = "TOLLKEEPER_PORT"


def _option(*names: str, **how: Any) -> Any:
    variable = names[0].removeprefix("--").split("/")[0].replace("-", "_").upper()
    return typer.Option(*names, envvar=f"TOLLKEEPER_{variable}", show_default=False, **how)


def _port(text: str) -> int | None:
    # Kubernetes has a meaning of its own for this variable, wherever there is a service called
    # tollkeeper: tcp://10.0.0.7:8080.
    if text.startswith("tcp://") and text == os.environ.get(_PORT):
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


Config = Annotated[
    str | None,
    _option("--config", metavar="FILE", help="Settings as YAML, by the names of the options."),
]
Rules = Annotated[
    str | None,
    _option(
        "--rules",
        metavar="FILE|URL",
        help="A rule document, or a database of rules: sqlite:///rules.db, "
        "postgresql://user@host/name. [default: a database in the data folder]",
    ),
]
Seed = Annotated[
    str | None,
    _option("--seed", metavar="FILE", help="Rules for a database that has none yet."),
]
Store = Annotated[
    str | None,
    _option(
        "--store",
        metavar="URI",
        help="Where quotas are kept: redis://host for a fleet. In the variable, a password is "
        "seen by nobody who lists the machine's processes. "
        "[default: a file in the data folder, exact across workers]",
    ),
]
Host = Annotated[str | None, _option("--host", metavar="ADDRESS", help="[default: 127.0.0.1]")]
Port = Annotated[
    int | None,
    _option("--port", metavar="N", help="0 is any that is free. [default: 8080]", parser=_port),
]
Grpc = Annotated[
    str | None,
    _option("--grpc", metavar="HOST:PORT", help="Where Envoy asks. [default: 127.0.0.1:8081]"),
]
NoGrpc = Annotated[bool, _option("--no-grpc", help="Not over gRPC at all.")]
Workers = Annotated[
    int | None, _option("--workers", metavar="N", help="[default: one for each processor]")
]
Data = Annotated[
    str | None,
    _option(
        "--data",
        metavar="FOLDER",
        help="For the store, the rules and the tokens. [default: $XDG_STATE_HOME/tollkeeper]",
    ),
]
OnFailure = Annotated[
    str | None,
    _option(
        "--on-failure",
        metavar="open|closed|local",
        help="When the store cannot decide, for rules that do not say. [default: open]",
    ),
]
Nodes = Annotated[
    int | None,
    _option(
        "--nodes",
        metavar="N",
        help="How many machines share the store: while it is away, rules with `on_failure: "
        "local` have their part of the limits on each. [default: 1]",
    ),
]
Ceiling = Annotated[
    str | None,
    _option(
        "--ceiling",
        metavar="RATE",
        help="While the store is away, the most that this machine lets pass in all: 5000/second. "
        "[default: none]",
    ),
]
Emergency = Annotated[
    str | None,
    _option(
        "--emergency",
        metavar="RATE",
        help="The same for each address, once it has been away for long: 60/minute. "
        "[default: none]",
    ),
]
EmergencyAfter = Annotated[
    float | None,
    _option("--emergency-after", metavar="SECONDS", help="How long that is. [default: 60]"),
]
Tokens = Annotated[
    str | None,
    _option(
        "--tokens",
        metavar="FILE",
        help="Who may ask; see `tollkeeper token`. [default: tokens.json in the data folder, "
        "if it is there]",
    ),
]
InsecureNoTokens = Annotated[
    bool | None,
    _option(
        "--insecure-no-tokens/--no-insecure-no-tokens",
        help="Let other machines check without a token.",
    ),
]
TrustedProxy = Annotated[
    list[str] | None,
    _option(
        "--trusted-proxy",
        metavar="CIDR",
        help="Whose X-Forwarded-For is believed; may be given again.",
    ),
]
Identify = Annotated[
    list[str] | None,
    _option(
        "--identify",
        metavar="FIELD=SOURCE",
        help="For /v1/authorize, who sends a request: api_key=header:X-API-Key; may be given "
        "again.",
    ),
]
TlsCert = Annotated[
    str | None, _option("--tls-cert", metavar="FILE", help="A certificate, in PEM.")
]
TlsKey = Annotated[str | None, _option("--tls-key", metavar="FILE", help="Its key.")]
NodeId = Annotated[
    str | None,
    _option("--node-id", metavar="NAME", help="In X-Tollkeeper-Node. [default: the host's name]"),
]
Draft = Annotated[
    str | None,
    _option(
        "--draft",
        metavar="10|7|6|none",
        help="The revision of the RateLimit headers. [default: 10]",
    ),
]
LegacyHeaders = Annotated[
    bool | None,
    _option("--legacy-headers/--no-legacy-headers", help="X-RateLimit-…. [default: yes]"),
]
Record = Annotated[
    str | None,
    _option(
        "--record",
        metavar="URL|off",
        help="Where decisions and usage are kept: sqlite:///records.db, "
        "postgresql://user@host/name. [default: a database in the data folder]",
    ),
]
Sample = Annotated[
    float | None,
    _option(
        "--sample",
        metavar="SHARE",
        help="Of the decisions that allow, how many are kept, from 0 to 1; all that deny are. "
        "[default: 0.01]",
    ),
]
RecordSubjects = Annotated[
    str | None,
    _option(
        "--record-subjects",
        metavar="plain|hashed|none",
        help="Who was counted, as it is recorded. [default: plain]",
    ),
]
KeepDecisions = Annotated[
    int | None,
    _option("--keep-decisions", metavar="DAYS", help="How long decisions are kept. [default: 7]"),
]
KeepUsage = Annotated[
    int | None,
    _option("--keep-usage", metavar="DAYS", help="How long usage is kept. [default: 90]"),
]
LogFormat = Annotated[
    str | None,
    _option("--log-format", metavar="auto|json|text", help="[default: text for a terminal]"),
]
AccessLog = Annotated[
    bool | None, _option("--access-log/--no-access-log", help="A line for each request.")
]
DrainSeconds = Annotated[
    float | None,
    _option(
        "--drain-seconds",
        metavar="N",
        help="After SIGTERM, so long /readyz says 503 before connections are refused. [default: 1]",
    ),
]
ShutdownSeconds = Annotated[
    float | None,
    _option(
        "--shutdown-seconds",
        metavar="N",
        help="How long answers that have begun may then take. [default: 30]",
    ),
]
