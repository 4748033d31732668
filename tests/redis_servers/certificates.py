"""Certificates for a test: an authority, and what it signed for the server and for a client.

Made by openssl with keys on an elliptic curve, which takes some milliseconds. They hold for a day.
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
    """A new authority and what it signed. Nobody else's authority would be believed."""
    authority = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
    ca_path, _ = _certificate(folder, "ca", "Tollkeeper test authority", authority)
    names = (f"subjectAltName=IP:{HOST},DNS:localhost", "extendedKeyUsage=serverAuth")
    server = _certificate(folder, "server", "localhost", names, signed_by="ca")
    client = _certificate(folder, "client", "client", ("extendedKeyUsage=clientAuth",), "ca")
    return Certificates(ca_path, *server, *client)


def _certificate(
    folder: Path, name: str, subject: str, extensions: Sequence[str], signed_by: str = ""
) -> tuple[Path, Path]:
    """Make NAME.crt and NAME.key, signed by another one made here, or by itself."""
    command = [program_path("openssl"), "req", "-x509", "-days", "1", *_NEW_KEY]
    command += ["-subj", f"/CN={subject}", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
    for extension in extensions:
        command += ["-addext", extension]
    if signed_by:
        command += ["-CA", f"{signed_by}.crt", "-CAkey", f"{signed_by}.key"]
        # Else `req -x509` would make it an authority too.
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ServerFailed(f"openssl could not make {name}.crt:\n{done.stderr}")
    return folder / f"{name}.crt", folder / f"{name}.key"
