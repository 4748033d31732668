"""Download the source distribution of the installed `limits`, for its own tests.

`tests/integration/test_limits_suite.py` runs them against our storages. pip downloads the archive
once, into the virtual environment. `make` does it together with the other installations; the test
does it itself where that did not happen.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path


def limits_sdist() -> Path:
    """Return the archive of the installed version; download it if it is not there.

    Raises RuntimeError, which says where to put the archive by hand.
    """
    wanted = version("limits")
    archive = Path(sys.prefix) / "limits-sdist" / f"limits-{wanted}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command += ["--quiet", "--no-deps", "--no-binary", "limits", "--dest", str(archive.parent)]
        if subprocess.run([*command, f"limits=={wanted}"], check=False).returncode:
            raise RuntimeError(
                f"pip could not download the source distribution of limits {wanted}, whose tests "
                f"run against our storages. Connect this machine to a package index that has it, "
                f"or save it as {archive}"
            )
    return archive


if __name__ == "__main__":
    try:
        print(limits_sdist())
    except RuntimeError as error:
        sys.exit(str(error))
