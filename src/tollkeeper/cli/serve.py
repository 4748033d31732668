"""`tollkeeper serve`: what can be told to it. What it then does is in `starting.py`."""

from __future__ import annotations

from tollkeeper.cli import serve_options as options
from tollkeeper.cli.rules_print import TROUBLE, telling


def serve(
    config: options.Config = None,
    rules: options.Rules = None,
    seed: options.Seed = None,
    store: options.Store = None,
    host: options.Host = None,
    port: options.Port = None,
    grpc: options.Grpc = None,
    no_grpc: options.NoGrpc = False,
    workers: options.Workers = None,
    data: options.Data = None,
    on_failure: options.OnFailure = None,
    nodes: options.Nodes = None,
    ceiling: options.Ceiling = None,
    emergency: options.Emergency = None,
    emergency_after: options.EmergencyAfter = None,
    tokens: options.Tokens = None,
    insecure_no_tokens: options.InsecureNoTokens = None,
    trusted_proxy: options.TrustedProxy = None,
    identify: options.Identify = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    node_id: options.NodeId = None,
    draft: options.Draft = None,
    legacy_headers: options.LegacyHeaders = None,
    record: options.Record = None,
    sample: options.Sample = None,
    record_subjects: options.RecordSubjects = None,
    keep_decisions: options.KeepDecisions = None,
    keep_usage: options.KeepUsage = None,
    log_format: options.LogFormat = None,
    access_log: options.AccessLog = None,
    drain_seconds: options.DrainSeconds = None,
    shutdown_seconds: options.ShutdownSeconds = None,
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
        from tollkeeper.service.process.settings import ServiceSettings  # noqa: PLC0415 - needs what an extra brings
        from tollkeeper.service.process.startup import run  # noqa: PLC0415 - same

        given.pop("config")
        if given.pop("no_grpc"):
            given["grpc"] = ""
        run(ServiceSettings.gather(given, config))
