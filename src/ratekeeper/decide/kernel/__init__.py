"""The C kernel, if it can be imported. `BUILT` says whether; only `stores/native.py` uses the rest.

The table is plain C (`table.c` and the files beside it) and does not know Python; `module.c` is the
binding. If the package was installed without a compiler, or in a sub-interpreter, the pure Python
store serves `memory://` with the same decisions, and `shared://` raises an error that says what is
missing.
"""

from __future__ import annotations

import logging

from ratekeeper.core import switches
from ratekeeper.core.model import Decision

_log = logging.getLogger("ratekeeper")

MISSING: tuple[str, str] = (
    "was not built",
    "install a C compiler and the Python headers, then reinstall ratekeeper",
)
"""The reason for `BUILT` being False, and the remedy."""

try:
    from ratekeeper.decide.kernel import _kernel
except ImportError as error:
    BUILT = False
    if "interpreter" in str(error):
        MISSING = (
            "does not run in a sub-interpreter",
            "use the main interpreter of the process (mod_wsgi: WSGIApplicationGroup %{GLOBAL})",
        )
        _log.warning(
            "the C kernel %s: memory:// decides in Python, about 20 times slower, and shared:// "
            "cannot be opened; %s",
            *MISSING,
        )
else:
    BUILT = True
    Decision.register(_kernel.Decision)

    def _pass_on_switches() -> None:
        _kernel.set_switches(switches.clock is not None, switches.limiting_off)

    switches.on_change(_pass_on_switches)
