"""Schemathesis reads the OpenAPI document and sends valid and invalid requests.

Schemathesis runs in its own process, so its imports and warnings do not affect this one. It has an
administrator's token, so it reaches every operation, and a seed, so a failure is reproducible.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from ratekeeper.service.http import openapi
from tests.service.admin.client import secrets_of
from tests.service_process import RULES, ServiceProcess

SECONDS_MAX = 400
EXAMPLES_MAX = 2
SEED = 20_261_115

# Exceptions that OpenAPI cannot express, each for one operation.
EXCEPTIONS = """
[[operations]]
# Gateways call it with their clients' methods, so any method is valid.
include-name = "GET /v1/authorize"
checks.unsupported_method.enabled = false

[[operations]]
# `validate` and `preview` may also be a rule's ID, and `validate` accepts invalid documents.
include-name = ["POST /v1/admin/rules/validate", "POST /v1/admin/rules/preview"]
checks.allow_header_conformance.enabled = false
checks.negative_data_rejection.enabled = false
# This phase would send documents with 20,001 rules, of 3 MB, which take seconds each.
phases.coverage.enabled = false

[[operations]]
# A rule's ID may end with `/promote`.
include-name = ["POST /v1/admin/rules/{id}/promote", "POST /v1/admin/rules/{id}/demote"]
checks.allow_header_conformance.enabled = false
checks.unsupported_method.enabled = false

[[operations]]
include-name = "PUT /v1/admin/rules"
phases.coverage.enabled = false
"""


def test_every_reply_conforms_to_the_openapi_document(tmp_path: Path) -> None:
    """No reply is 5xx, each matches its description, and invalid requests are rejected.

    `positive_data_acceptance` is off: a schema cannot say whether a tier or version exists.
    """
    secrets = secrets_of(tmp_path)
    seed = tmp_path / "seed.json"
    seed.write_text(json.dumps(RULES), encoding="utf-8")
    (tmp_path / "schemathesis.toml").write_text(EXCEPTIONS, encoding="utf-8")
    options = ("--seed", str(seed), "--tokens", str(tmp_path / "tokens.json"))
    with ServiceProcess(f"sqlite:///{tmp_path / 'rules.db'}", *options, records=True) as service:
        ran = subprocess.run(
            [
                *(program(), "run", f"{service.url}/openapi.json", "--no-color"),
                *("--header", f"Authorization: Bearer {secrets['admin']}"),
                *("--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES_MAX)),
                *("--seed", str(SEED), "--generation-database", "none", "--warnings", "off"),
                *("--exclude-checks", "positive_data_acceptance", "--max-failures", "5"),
                *("--request-timeout", "60"),
            ],
            cwd=tmp_path,
            capture_output=True,
            check=False,
            text=True,
            timeout=SECONDS_MAX,
        )
        assert ran.returncode == 0, shortened(ran.stdout) + ran.stderr[-2_000:]
        # The test must not pass because no operation was called.
        count = len(list(openapi.operations(service.ask("GET", "/openapi.json").data)))
        assert f"Operations:       {count} selected / {count} total" in ran.stdout
        assert service.ask("GET", "/readyz").status == 200
        assert "Traceback" not in service.log_text()


def shortened(output: str) -> str:
    """Return the last lines of a report, each cut; some lines have megabytes."""
    return "\n".join(line[:400] for line in output.splitlines()[-200:])


def program() -> str:
    """Return the path of schemathesis, next to this Python."""
    found = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert found, "schemathesis is not installed: pip install 'ratekeeper[dev]'"
    return found
