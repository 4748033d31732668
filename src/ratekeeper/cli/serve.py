"""`ratekeeper serve`: the options of the service. `service/process/startup.py` starts it.

Each option is also an environment variable of the same name. None means that an option was given
neither on the command line nor as a variable; then the --config file is read.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import typer

from ratekeeper.cli.common import CliCommand

_PORT: Final = "RATEKEEPER_PORT"
# The headings of `--help` with their options, the most important first.
HEADINGS: Final = {
    "General": "config rules seed store host port workers data tokens console_link",
    "Rules and store": "on_failure region regions region_shares",
    "Fleet": "node_id nodes gossip gossip_key gossip_advertise fleet_name peers dead_seconds "
    "lease_seconds flush_seconds warm allowances ceiling emergency emergency_after",
    "Security": "insecure_no_tokens tls_cert tls_key trusted_proxy forwarded",
    "Identity of clients": "identify jwks jwt_key jwt_algorithm jwt_issuer jwt_audience jwt_leeway",
    "gRPC for Envoy": "grpc no_grpc grpc_server grpc_client_ca",
    "Answers": "draft legacy_headers",
    "Records": "record sample record_subjects keep_decisions keep_usage keep_rows keep_megabytes",
    "Process and logs": "log_format access_log drain_seconds shutdown_seconds",
}


class ServeCommand(CliCommand):
    """The command with its options under HEADINGS."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, each heading with its own."""
        records = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx)}
        groups = [(heading, names.split()) for heading, names in HEADINGS.items()]
        known = {name for _, names in groups for name in names}
        groups.append(("Other", [name for name in records if name not in known]))
        for heading, names in groups:
            if found := [records[name] for name in names if records.get(name)]:
                with formatter.section(heading):
                    formatter.write_dl(found)


def _option(*names: str, **how: Any) -> Any:
    variable = names[0].removeprefix("--").split("/")[0].replace("-", "_").upper()
    # The help has the defaults in words, and the rule by which variables are named.
    return typer.Option(
        *names, envvar=f"RATEKEEPER_{variable}", show_default=False, show_envvar=False, **how
    )


def _port(text: str) -> int | None:
    # If a Kubernetes service is called ratekeeper, Kubernetes sets this variable to its address:
    # tcp://10.0.0.7:8080.
    if text.startswith("tcp://") and text == os.environ.get(_PORT):
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


ConfigOption = Annotated[
    str | None,
    _option(
        "--config",
        metavar="FILE",
        help="A YAML file with settings; their names are those of the options.",
    ),
]
RulesOption = Annotated[
    str | None,
    _option(
        "--rules",
        metavar="FILE|URL|none",
        help="A rule document or a database of rules: sqlite:///rules.db, "
        "postgresql://user@host/name. none: only limits that are given with the call. "
        "[default: a database in the data folder]",
    ),
]
SeedOption = Annotated[
    str | None,
    _option("--seed", metavar="FILE", help="A rule document for a database that has no rules yet."),
]
StoreOption = Annotated[
    str | None,
    _option(
        "--store",
        metavar="URI",
        help="The store: redis://host for several machines. If it contains a password, use the "
        "variable: other users can see the arguments of a process. "
        "[default: a file in the data folder, shared by all workers]",
    ),
]
RegionOption = Annotated[
    str | None,
    _option(
        "--region",
        metavar="NAME",
        help="The region that this machine is in: one of --regions, which share the limits of "
        "rules with `scope: global`. [default: no regions]",
    ),
]
RegionsOption = Annotated[
    list[str] | None,
    _option(
        "--regions",
        metavar="NAME=URI",
        help="The Redis of each region: eu=redis://eu.internal; can be repeated. The same in all "
        "regions. For passwords, use the variable (separated by spaces) or the --config file.",
    ),
]
RegionSharesOption = Annotated[
    list[str] | None,
    _option(
        "--region-shares",
        metavar="NAME=SHARE",
        help="The share of each region in limits that are `across_regions: exact`: eu=0.4; can be "
        "repeated. They add up to 1. [default: equal shares]",
    ),
]
HostOption = Annotated[
    str | None, _option("--host", metavar="ADDRESS", help="[default: 127.0.0.1]")
]
PortOption = Annotated[
    int | None,
    _option("--port", metavar="N", help="0 selects a free port. [default: 8080]", parser=_port),
]
GrpcOption = Annotated[
    str | None,
    _option("--grpc", metavar="HOST:PORT", help="The address for Envoy. [default: 127.0.0.1:8081]"),
]
NoGrpcOption = Annotated[bool, _option("--no-grpc", help="Do not serve gRPC.")]
WorkersOption = Annotated[
    int | None, _option("--workers", metavar="N", help="[default: one per processor]")
]
DataOption = Annotated[
    str | None,
    _option(
        "--data",
        metavar="FOLDER",
        help="The folder for the store, the rules and the tokens. "
        "[default: $XDG_STATE_HOME/ratekeeper]",
    ),
]
OnFailureOption = Annotated[
    str | None,
    _option(
        "--on-failure",
        metavar="open|closed|local",
        help="The failure policy of rules without one, for when the store is unavailable. "
        "[default: open]",
    ),
]
NodesOption = Annotated[
    int | None,
    _option(
        "--nodes",
        metavar="N",
        help="How many machines share the store, at least. A lease is a share of what is left. "
        "While the store is unavailable, each machine enforces its share of the limits for rules "
        "with `on_failure: local`. With --gossip, the live number counts. [default: 1]",
    ),
]
GossipOption = Annotated[
    str | None,
    _option(
        "--gossip",
        metavar="HOST:PORT",
        help="Exchange hints with the other nodes at this address, by UDP: 10.0.0.5:7946. "
        "An address in numbers, or localhost. [default: no gossip]",
    ),
]
GossipKeyOption = Annotated[
    str | None,
    _option(
        "--gossip-key",
        metavar="FILE",
        help="The keys that authenticate gossip, one on each line: the first signs, all are "
        "accepted. Required unless the address of --gossip is of this machine only.",
    ),
]
GossipAdvertiseOption = Annotated[
    str | None,
    _option(
        "--gossip-advertise",
        metavar="HOST:PORT",
        help="The address at which the other nodes reach this one, if it is another one: that of "
        "the host of a container. In numbers. [default: that of --gossip]",
    ),
]
FleetNameOption = Annotated[
    str | None,
    _option(
        "--fleet-name",
        metavar="NAME",
        help="Nodes hear only the gossip of nodes with the same name. [default: ratekeeper]",
    ),
]
PeersOption = Annotated[
    list[str] | None,
    _option(
        "--peers",
        metavar="HOST:PORT,…|dns:NAME:PORT|store",
        help="How this node finds the others: their addresses, a name that resolves to all of "
        "them, or the store. [default: store]",
    ),
]
DeadSecondsOption = Annotated[
    float | None,
    _option(
        "--dead-seconds",
        metavar="N",
        help="A node that gossip does not hear of for this time is dead; for half of it, "
        "suspected. At most 60; give all nodes the same. [default: 15]",
    ),
]
LeaseSecondsOption = Annotated[
    float | None,
    _option(
        "--lease-seconds",
        metavar="N",
        help="How long a lease of a rule with `consistency: leased` lasts, at most. [default: 1]",
    ),
]
FlushSecondsOption = Annotated[
    float | None,
    _option(
        "--flush-seconds",
        metavar="N",
        help="How long a pending charge of a rule with `consistency: eventual` waits, at most, "
        "before the node reports it. [default: 0.2]",
    ),
]
WarmOption = Annotated[
    float | None,
    _option(
        "--warm",
        metavar="SHARE",
        help="The used share of a limit from which the store decides each check of a rule with "
        "`consistency: eventual`. [default: 0.5]",
    ),
]
AllowancesOption = Annotated[
    int | None,
    _option(
        "--allowances",
        metavar="N",
        help="How many subjects this machine can answer itself at a time, for rules with "
        "`consistency: leased` or `eventual`. [default: 100000]",
    ),
]
CeilingOption = Annotated[
    str | None,
    _option(
        "--ceiling",
        metavar="RATE",
        help="The most that this machine allows in total while the store is unavailable: "
        "5000/second. [default: none]",
    ),
]
EmergencyOption = Annotated[
    str | None,
    _option(
        "--emergency",
        metavar="RATE",
        help="The most that each client address is allowed once the store has been unavailable for "
        "--emergency-after: 60/minute. [default: none]",
    ),
]
EmergencyAfterOption = Annotated[
    float | None,
    _option("--emergency-after", metavar="SECONDS", help="When --emergency begins. [default: 60]"),
]
TokensOption = Annotated[
    str | None,
    _option(
        "--tokens",
        metavar="FILE",
        help="The token file; see `ratekeeper token`. [default: tokens.json in the data folder, "
        "if it exists]",
    ),
]
InsecureNoTokensOption = Annotated[
    bool | None,
    _option(
        "--insecure-no-tokens/--no-insecure-no-tokens",
        help="Serve other machines without tokens.",
    ),
]
TrustedProxyOption = Annotated[
    list[str] | None,
    _option(
        "--trusted-proxy",
        metavar="CIDR",
        help="A proxy whose forwarded addresses are trusted; can be repeated.",
    ),
]
ForwardedOption = Annotated[
    str | None,
    _option(
        "--forwarded",
        metavar="x-forwarded-for|forwarded|x-real-ip",
        help="The header in which trusted proxies name the client. [default: any of them]",
    ),
]
IdentifyOption = Annotated[
    list[str] | None,
    _option(
        "--identify",
        metavar="FIELD=SOURCE",
        help="How /v1/authorize identifies a request: api_key=header:X-API-Key, user=claim:sub; "
        "can be repeated.",
    ),
]
JwksOption = Annotated[
    str | None,
    _option(
        "--jwks",
        metavar="FILE|URL",
        help="The keys that verify claim:NAME: https://id.example/.well-known/jwks.json.",
    ),
]
JwtKeyOption = Annotated[
    str | None,
    _option(
        "--jwt-key",
        metavar="FILE",
        help="Instead of --jwks: one public key (PEM) or shared secret.",
    ),
]
JwtAlgorithmOption = Annotated[
    list[str] | None,
    _option(
        "--jwt-algorithm",
        metavar="NAME",
        help="An accepted algorithm of tokens: RS256; can be repeated.",
    ),
]
JwtIssuerOption = Annotated[
    list[str] | None,
    _option(
        "--jwt-issuer",
        metavar="NAME",
        help="An accepted issuer of tokens; can be repeated. [default: any]",
    ),
]
JwtAudienceOption = Annotated[
    list[str] | None,
    _option(
        "--jwt-audience",
        metavar="NAME",
        help="An audience that tokens may be for; can be repeated. [default: any]",
    ),
]
JwtLeewayOption = Annotated[
    float | None,
    _option(
        "--jwt-leeway",
        metavar="SECONDS",
        help="How far the clock of the issuer may differ. [default: 0]",
    ),
]
TlsCertOption = Annotated[
    str | None, _option("--tls-cert", metavar="FILE", help="The TLS certificate (PEM).")
]
TlsKeyOption = Annotated[
    str | None, _option("--tls-key", metavar="FILE", help="The key of the certificate (PEM).")
]
GrpcServerOption = Annotated[
    str | None,
    _option(
        "--grpc-server",
        metavar="auto|libnghttp2|grpcio",
        help="What gRPC runs on. auto: on libnghttp2 if it was built, otherwise on grpcio, which "
        "is slower. [default: auto]",
    ),
]
GrpcClientCaOption = Annotated[
    str | None,
    _option(
        "--grpc-client-ca",
        metavar="FILE",
        help="Clients of gRPC need a certificate of this authority (PEM).",
    ),
]
NodeIdOption = Annotated[
    str | None,
    _option(
        "--node-id",
        metavar="NAME",
        help="The value of X-Ratekeeper-Node. [default: a digest of the host name]",
    ),
]
DraftOption = Annotated[
    str | None,
    _option(
        "--draft",
        metavar="10|7|6|none",
        help="The draft revision of the RateLimit headers. [default: 10]",
    ),
]
LegacyHeadersOption = Annotated[
    bool | None,
    _option("--legacy-headers/--no-legacy-headers", help="Send X-RateLimit-…. [default: yes]"),
]
RecordOption = Annotated[
    str | None,
    _option(
        "--record",
        metavar="URL|off",
        help="The database for decisions and usage: sqlite:///records.db, "
        "postgresql://user@host/name. [default: a database in the data folder]",
    ),
]
SampleOption = Annotated[
    float | None,
    _option(
        "--sample",
        metavar="SHARE",
        help="The share of allowed decisions to record, from 0 to 1. All denials are recorded. "
        "[default: 0.01]",
    ),
]
RecordSubjectsOption = Annotated[
    str | None,
    _option(
        "--record-subjects",
        metavar="plain|hashed|none",
        help="How subjects are recorded. [default: plain]",
    ),
]
KeepDecisionsOption = Annotated[
    int | None,
    _option("--keep-decisions", metavar="DAYS", help="How long decisions are kept. [default: 7]"),
]
KeepUsageOption = Annotated[
    int | None,
    _option("--keep-usage", metavar="DAYS", help="How long usage is kept. [default: 90]"),
]
KeepRowsOption = Annotated[
    int | None,
    _option(
        "--keep-rows",
        metavar="ROWS",
        help="How many decisions, and how many rows of usage, are kept at most. [default: 500000]",
    ),
]
KeepMegabytesOption = Annotated[
    int | None,
    _option(
        "--keep-megabytes",
        metavar="MB",
        help="How much space the records take at most, in millions of bytes. [default: 512]",
    ),
]
LogFormatOption = Annotated[
    str | None,
    _option("--log-format", metavar="auto|json|text", help="[default: text for a terminal]"),
]
AccessLogOption = Annotated[
    bool | None, _option("--access-log/--no-access-log", help="Log each request.")
]
ConsoleLinkOption = Annotated[
    bool | None,
    _option(
        "--console-link/--no-console-link",
        help="Print a one-time login link of the console at startup. With the log format json it "
        "is not printed: logs are kept and read by others. See `ratekeeper console link`.",
    ),
]
DrainSecondsOption = Annotated[
    float | None,
    _option(
        "--drain-seconds",
        metavar="N",
        help="How long /readyz answers 503 after SIGTERM before connections are refused. "
        "[default: 1]",
    ),
]
ShutdownSecondsOption = Annotated[
    float | None,
    _option(
        "--shutdown-seconds",
        metavar="N",
        help="How long requests in progress may take after that. [default: 30]",
    ),
]


def serve(
    config: ConfigOption = None,
    rules: RulesOption = None,
    seed: SeedOption = None,
    store: StoreOption = None,
    region: RegionOption = None,
    regions: RegionsOption = None,
    region_shares: RegionSharesOption = None,
    host: HostOption = None,
    port: PortOption = None,
    grpc: GrpcOption = None,
    no_grpc: NoGrpcOption = False,
    workers: WorkersOption = None,
    data: DataOption = None,
    on_failure: OnFailureOption = None,
    nodes: NodesOption = None,
    gossip: GossipOption = None,
    gossip_key: GossipKeyOption = None,
    gossip_advertise: GossipAdvertiseOption = None,
    fleet_name: FleetNameOption = None,
    peers: PeersOption = None,
    dead_seconds: DeadSecondsOption = None,
    lease_seconds: LeaseSecondsOption = None,
    flush_seconds: FlushSecondsOption = None,
    warm: WarmOption = None,
    allowances: AllowancesOption = None,
    ceiling: CeilingOption = None,
    emergency: EmergencyOption = None,
    emergency_after: EmergencyAfterOption = None,
    tokens: TokensOption = None,
    insecure_no_tokens: InsecureNoTokensOption = None,
    trusted_proxy: TrustedProxyOption = None,
    forwarded: ForwardedOption = None,
    identify: IdentifyOption = None,
    jwks: JwksOption = None,
    jwt_key: JwtKeyOption = None,
    jwt_algorithm: JwtAlgorithmOption = None,
    jwt_issuer: JwtIssuerOption = None,
    jwt_audience: JwtAudienceOption = None,
    jwt_leeway: JwtLeewayOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    grpc_server: GrpcServerOption = None,
    grpc_client_ca: GrpcClientCaOption = None,
    node_id: NodeIdOption = None,
    draft: DraftOption = None,
    legacy_headers: LegacyHeadersOption = None,
    record: RecordOption = None,
    sample: SampleOption = None,
    record_subjects: RecordSubjectsOption = None,
    keep_decisions: KeepDecisionsOption = None,
    keep_usage: KeepUsageOption = None,
    keep_rows: KeepRowsOption = None,
    keep_megabytes: KeepMegabytesOption = None,
    log_format: LogFormatOption = None,
    access_log: AccessLogOption = None,
    console_link: ConsoleLinkOption = None,
    drain_seconds: DrainSecondsOption = None,
    shutdown_seconds: ShutdownSecondsOption = None,
) -> None:
    """Run the service: checks over HTTP and, for Envoy, over gRPC; the console is at /console.

    An option is also a variable (RATEKEEPER_NODE_ID) and a line of the --config file (node-id: a).
    Other machines need tokens. Exit code: 0 ended by a signal; 1 repeated crashes; 2 no start.

    Example: ratekeeper serve --seed limits.yaml --console-link

    Example: ratekeeper serve --rules postgresql://app@db/rules --store redis://cache --host 0.0.0.0
    """
    _serve(dict(locals()))


def _serve(given: dict[str, Any]) -> None:
    """Run the service with the arguments of the command."""
    from ratekeeper.service.process.settings import ServiceSettings  # noqa: PLC0415 - needs an extra
    from ratekeeper.service.process.startup import run  # noqa: PLC0415 - same

    config = given.pop("config")
    if given.pop("no_grpc"):
        given["grpc"] = ""
    run(ServiceSettings.gather(given, config))
