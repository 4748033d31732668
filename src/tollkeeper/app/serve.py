"""`tollkeeper serve`: what can be told to it. What it then does is in `starting.py`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tollkeeper.app.rules_print import TROUBLE, telling


def _option(*names: str, **how: Any) -> Any:
    """An option that also has an environment variable of the same name."""
    variable = names[0].removeprefix("--").split("/")[0].replace("-", "_").upper()
    return typer.Option(*names, envvar=f"TOLLKEEPER_{variable}", show_default=False, **how)


def serve(
    config: Annotated[
        str | None,
        _option("--config", metavar="FILE", help="Settings as YAML, by the names of the options."),
    ] = None,
    rules: Annotated[
        str | None,
        _option(
            "--rules",
            metavar="FILE|URL",
            help="A rule document, or a database of rules: sqlite:///rules.db, "
            "postgresql://user@host/name. [default: a database in the data folder]",
        ),
    ] = None,
    seed: Annotated[
        str | None,
        _option("--seed", metavar="FILE", help="Rules for a database that has none yet."),
    ] = None,
    store: Annotated[
        str | None,
        _option(
            "--store",
            metavar="URI",
            help="Where quotas are kept: redis://host for a fleet. In the variable, a password is "
            "seen by nobody who lists the machine's processes. "
            "[default: a file in the data folder, exact across workers]",
        ),
    ] = None,
    host: Annotated[
        str | None, _option("--host", metavar="ADDRESS", help="[default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None, _option("--port", metavar="N", help="0 is any that is free. [default: 8080]")
    ] = None,
    grpc: Annotated[
        str | None,
        _option("--grpc", metavar="HOST:PORT", help="Where Envoy asks. [default: 127.0.0.1:8081]"),
    ] = None,
    no_grpc: Annotated[bool, _option("--no-grpc", help="Not over gRPC at all.")] = False,
    workers: Annotated[
        int | None, _option("--workers", metavar="N", help="[default: one for each processor]")
    ] = None,
    data: Annotated[
        str | None,
        _option(
            "--data",
            metavar="FOLDER",
            help="For the store, the rules and the tokens. [default: $XDG_STATE_HOME/tollkeeper]",
        ),
    ] = None,
    on_failure: Annotated[
        str | None,
        _option(
            "--on-failure",
            metavar="open|closed",
            help="When the store cannot decide, for rules that do not say. [default: open]",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        _option(
            "--nodes",
            metavar="N",
            help="How many machines share the store: while it is away, rules with `on_failure: "
            "local` have their part of the limits on each. [default: 1]",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        _option(
            "--tokens",
            metavar="FILE",
            help="Who may ask; see `tollkeeper token`. [default: tokens.json in the data folder, "
            "if it is there]",
        ),
    ] = None,
    insecure_no_tokens: Annotated[
        bool | None,
        _option(
            "--insecure-no-tokens/--no-insecure-no-tokens",
            help="Let other machines check without a token.",
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        _option(
            "--trusted-proxy",
            metavar="CIDR",
            help="Whose X-Forwarded-For is believed; may be given again.",
        ),
    ] = None,
    identify: Annotated[
        list[str] | None,
        _option(
            "--identify",
            metavar="FIELD=SOURCE",
            help="For /v1/authorize, who sends a request: api_key=header:X-API-Key; may be given "
            "again.",
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, _option("--tls-cert", metavar="FILE", help="A certificate, in PEM.")
    ] = None,
    tls_key: Annotated[str | None, _option("--tls-key", metavar="FILE", help="Its key.")] = None,
    node_id: Annotated[
        str | None,
        _option(
            "--node-id", metavar="NAME", help="In X-Tollkeeper-Node. [default: the host's name]"
        ),
    ] = None,
    draft: Annotated[
        str | None,
        _option(
            "--draft",
            metavar="10|7|6|none",
            help="The revision of the RateLimit headers. [default: 10]",
        ),
    ] = None,
    legacy_headers: Annotated[
        bool | None,
        _option("--legacy-headers/--no-legacy-headers", help="X-RateLimit-…. [default: yes]"),
    ] = None,
    log_format: Annotated[
        str | None, _option("--log-format", metavar="json|text", help="[default: json]")
    ] = None,
    access_log: Annotated[
        bool | None, _option("--access-log/--no-access-log", help="A line for each request.")
    ] = None,
    drain_seconds: Annotated[
        float | None,
        _option(
            "--drain-seconds",
            metavar="N",
            help="After SIGTERM, so long /readyz says 503 before connections are refused. "
            "[default: 1]",
        ),
    ] = None,
    shutdown_seconds: Annotated[
        float | None,
        _option(
            "--shutdown-seconds",
            metavar="N",
            help="How long answers that have begun may then take. [default: 30]",
        ),
    ] = None,
) -> None:
    """Run the service: checks over HTTP and, for Envoy, over gRPC.

    Every option is also an environment variable (--node-id is TOLLKEEPER_NODE_ID) and a line of the
    --config file (node-id: eu-1). It listens on this machine alone unless told otherwise, and for
    others it wants tokens.

    Exit code: 0 it was told to end; 1 a worker died again and again; 2 it could not be started.

    Example: tollkeeper serve --rules limits.yaml

    Example: tollkeeper serve --rules postgresql://app@db/rules --store redis://cache --host 0.0.0.0
    """
    given = dict(locals())
    with telling(as_json=False, problems=TROUBLE):
        from tollkeeper.app.settings import Settings  # noqa: PLC0415 - needs what an extra brings
        from tollkeeper.app.starting import run  # noqa: PLC0415 - same

        given.pop("config")
        if given.pop("no_grpc"):
            given["grpc"] = ""
        run(Settings.gather(given, config))
