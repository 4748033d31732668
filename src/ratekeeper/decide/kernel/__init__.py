"""The C kernel, if it was built. `BUILT` says whether; only `stores/native.py` uses the rest.

The table is plain C (`table.c` and the files beside it) and does not know Python; `module.c` is the
binding. If the package was installed without a compiler, the pure Python store serves `memory://`
with the same decisions, and `shared://` raises an error that says what is missing.
"""

from __future__ import annotations

from ratekeeper.core import switches
from ratekeeper.core.model import Decision

try:
    from ratekeeper.decide.kernel import _kernel
except ImportError:
    BUILT = False
else:
    BUILT = True
    Decision.register(_kernel.Decision)

    def _pass_on_switches() -> None:
        _kernel.set_bypass(switches.clock is not None or switches.limiting_off)

    switches.on_change(_pass_on_switches)
