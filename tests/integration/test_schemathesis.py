"""A program reads the service's description and asks all that it allows, and much that it does not.

Schemathesis runs by itself, so that what it imports and warns of stays out of this process. It asks
with an administrator's token, so nothing is closed to it, from a seed, so a failure comes again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.service.admin.client import secrets_of
from tests.service_process import RULES, ServiceProcess

SECONDS_MAX = 400
EXAMPLES_MAX = 10
SEED = 20_261_115

# What the description cannot say, each for one operation.
EXCEPTIONS = """
[[operations]]
# Gateways ask with their clients' methods, whichever those are.
include-name = "GET /v1/authorize"
checks.unsupported_method.enabled = false

[[operations]]
# `validate` may be a rule's id, too; and a document that is wrong is what it is asked about.
include-name = "POST /v1/admin/rules/validate"
checks.allow_header_conformance.enabled = false
checks.negative_data_rejection.enabled = false
# It would send every document that is one too long: 20,001 rules, in 3 MB, for seconds each.
phases.coverage.enabled = false

[[operations]]
include-name = "PUT /v1/admin/rules"
phases.coverage.enabled = false
"""


def test_no_request_is_answered_other_than_described(tmp_path: Path) -> None:
    """No 5xx; statuses, types, headers and bodies as described; what is not allowed is refused.

    Left out is `positive_data_acceptance`: whether there is such a tier or version, no schema says.
    """
    secrets = secrets_of(tmp_path)
    seed = tmp_path / "seed.json"
    seed.write_text(json.dumps(RULES), encoding="utf-8")
    (tmp_path / "schemathesis.toml").write_text(EXCEPTIONS, encoding="utf-8")
    options = ("--seed", str(seed), "--tokens", str(tmp_path / "tokens.json"))
    with ServiceProcess(f"sqlite:///{tmp_path / 'rules.db'}", *options) as service:
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
        assert ran.returncode == 0, told(ran.stdout) + ran.stderr[-2_000:]
        # So that it cannot pass by asking nothing.
        assert "Operations:       44 selected / 44 total" in ran.stdout
        assert service.ask("GET", "/readyz").status == 200
        assert "Traceback" not in service.log_text()


def told(output: str) -> str:
    """The lines of a report, each as far as a person reads; some hold megabytes."""
    return "\n".join(line[:400] for line in output.splitlines()[-200:])


def program() -> str:
    """Where it is: beside this Python."""
    found = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert found, "schemathesis is not installed: pip install 'tollkeeper[dev]'"
    return found
