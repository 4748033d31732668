"""What servers and methods share."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.grpc.calls import CallError, Status, TlsFiles


@pytest.mark.parametrize("status", Status)
def test_a_status_has_the_name_and_number_of_grpc(status: Status) -> None:
    """A client of any language knows what is meant."""
    assert grpc.StatusCode[status.name].value[0] == status


def test_an_error_says_its_message() -> None:
    """A log that prints the error prints what the client reads."""
    error = CallError(Status.NOT_FOUND, "there is no rule orders")
    assert (str(error), error.status) == ("there is no rule orders", Status.NOT_FOUND)


def test_the_contents_of_the_files(tmp_path: Path) -> None:
    """The authority is optional; a file that cannot be read is named."""
    for name in ("certificate", "key"):
        (tmp_path / name).write_text(name)
    files = TlsFiles(tmp_path / "certificate", tmp_path / "key")
    assert files.contents() == (b"certificate", b"key", None)
    with pytest.raises(ConfigError, match=r"authority cannot be read: No such file"):
        TlsFiles(files.certificate, files.key, tmp_path / "authority").contents()
