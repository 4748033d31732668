"""A real service whose workers have OpenTelemetry configured: checks join the traces of callers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess

# As `opentelemetry-instrument` does in each process: configure a provider first.
CONFIGURE = """
import os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

_provider = TracerProvider()
_file = open(os.path.join(os.environ["SPANS"], f"{os.getpid()}.spans"), "a", buffering=1)
_line = lambda span: span.to_json(indent=None) + "\\n"
_provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=_file, formatter=_line)))
trace.set_tracer_provider(_provider)
"""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


def test_checks_of_the_service_join_the_trace_of_the_caller(tmp_path: Path) -> None:
    """Each check is one span below that of the caller, without a key."""
    (tmp_path / "sitecustomize.py").write_text(CONFIGURE, encoding="utf-8")
    env = {"PYTHONPATH": str(tmp_path), "SPANS": str(tmp_path)}

    def spans() -> list[dict[str, Any]]:
        lines = [
            line
            for path in tmp_path.glob("*.spans")
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        return [json.loads(line) for line in lines]

    with ServiceProcess(env=env) as service:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        assert service.ask("POST", "/v1/check", {"user": "secret-user"}, headers).status == 200
        assert service.ask("POST", "/v1/check", {"user": "secret-user"}).status == 200
        found = until(lambda: len(spans()) == 2 and spans(), "two spans", 10, spans)
    first, second = found
    assert first["name"] == second["name"] == "ratekeeper.check"
    assert first["context"]["trace_id"] == f"0x{TRACE}"
    assert first["parent_id"] == f"0x{CALLER}"
    assert second["parent_id"] is None
    assert first["attributes"]["ratekeeper.rule"] == "users"
    assert first["attributes"]["ratekeeper.outcome"] == "allowed"
    assert "secret-user" not in json.dumps(found)
