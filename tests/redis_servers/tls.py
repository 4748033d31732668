"""One redis-server that accepts only TLS."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from urllib.parse import urlencode

from tests.redis_servers.certificates import make_certificates
from tests.redis_servers.ports import HOST
from tests.redis_servers.scratch import scratch
from tests.redis_servers.single import Single, User


class Tls(Single):
    """A Single whose port accepts only TLS, with new certificates.

    `client_certificates`  reject clients without a certificate; `uri` then names the client's

    `ca_path` is the authority to trust; `cert_path` and `key_path` are the client's.
    """

    def __init__(
        self,
        *,
        client_certificates: bool = False,
        password: str = "",
        users: Sequence[User] = (),
        lines: Sequence[str] = (),
    ) -> None:
        self._certificates_folder = scratch().new_folder("certificates")
        made = make_certificates(self._certificates_folder)
        self.ca_path = made.ca_path
        self.cert_path = made.client_cert_path
        self.key_path = made.client_key_path
        self.client_certificates = client_certificates
        login: dict[str, object] = {"ssl": True, "ssl_ca_certs": str(self.ca_path)}
        if client_certificates:
            login["ssl_certfile"] = str(self.cert_path)
            login["ssl_keyfile"] = str(self.key_path)
        tls_lines = (
            "port 0",  # overrides the port line before it
            "tls-port {port}",
            f"tls-ca-cert-file {made.ca_path}",
            f"tls-cert-file {made.server_cert_path}",
            f"tls-key-file {made.server_key_path}",
            f"tls-auth-clients {'yes' if client_certificates else 'no'}",
        )
        super().__init__(password=password, users=users, lines=[*tls_lines, *lines], login=login)

    @property
    def uri(self) -> str:
        """Return the store's URI, with the certificate files of the client."""
        files = {"tls_ca": self.ca_path}
        if self.client_certificates:
            files |= {"tls_cert": self.cert_path, "tls_key": self.key_path}
        return f"rediss://{self._login_part}{HOST}:{self.port}/0?{urlencode(files, safe='/')}"

    def stop(self) -> None:
        """Kill the server and remove its files and certificates. It cannot be started again."""
        super().stop()
        shutil.rmtree(self._certificates_folder, ignore_errors=True)
