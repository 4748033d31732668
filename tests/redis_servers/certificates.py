"""Make certificates for a test: an authority, and one each for the server and a client.

openssl makes them with keys on an elliptic curve, in some milliseconds. They are valid for a day.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.redis_servers.ports import HOST
from tests.redis_servers.server import ServerFailed, program_path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM format, all in one folder."""

    ca_path: Path
    server_cert_path: Path
    server_key_path: Path
    client_cert_path: Path
    client_key_path: Path


def make_certificates(folder: Path) -> Certificates:
    """Make a new authority, and the server's and the client's certificates signed by it."""
    authority = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
    ca_path, _ = _certificate(folder, "ca", "Ratekeeper test authority", authority)
    names = (f"subjectAltName=IP:{HOST},DNS:localhost", "extendedKeyUsage=serverAuth")
    server = _certificate(folder, "server", "localhost", names, signed_by="ca")
    client = _certificate(folder, "client", "client", ("extendedKeyUsage=clientAuth",), "ca")
    return Certificates(ca_path, *server, *client)


def _certificate(
    folder: Path, name: str, subject: str, extensions: Sequence[str], signed_by: str = ""
) -> tuple[Path, Path]:
    """Make NAME.crt and NAME.key, signed by another certificate of the folder or by itself."""
    command = [program_path("openssl"), "req", "-x509", "-days", "1", *_NEW_KEY]
    command += ["-subj", f"/CN={subject}", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
    for extension in extensions:
        command += ["-addext", extension]
    if signed_by:
        command += ["-CA", f"{signed_by}.crt", "-CAkey", f"{signed_by}.key"]
        # Without this line, `req -x509` would make it an authority too.
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ServerFailed(f"openssl could not make {name}.crt:\n{done.stderr}")
    return folder / f"{name}.crt", folder / f"{name}.key"
