"""The C kernel, where it was built. `BUILT` says whether; nothing else here is for anyone but
`stores/native.py`.

The table is plain C (`table.c` and what it includes) and knows nothing of Python; `module.c` is the
binding. Where the package was installed without a compiler, `memory://` is served by the pure
Python store with the same answers, and `shared://` says what is missing.
"""

from __future__ import annotations

from tollkeeper.core import switches
from tollkeeper.core.model import Decision

try:
    from tollkeeper.decide.kernel import _kernel
except ImportError:
    BUILT = False
else:
    BUILT = True
    Decision.register(_kernel.Decision)

    def _tell_kernel() -> None:
        _kernel.set_bypass(switches.clock is not None or switches.limiting_off)

    switches.on_change(_tell_kernel)
