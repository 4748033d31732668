"""A process that takes part in the sync of a region, run as a program.

    python -m tests.integration.region_node NAME REGION '{"eu": URI, "us": URI}'

All regions have the same share. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction

from ratekeeper.decide.stores import open_store
from ratekeeper.regions.exchange import RegionSync
from ratekeeper.regions.table import share_table


def main() -> None:
    """Take part until the input ends."""
    name, region, text = sys.argv[1:]
    uris = json.loads(text)
    counts = {each: open_store(uri).regional for each, uri in uris.items()}
    known = {each: found for each, found in counts.items() if found is not None}
    sync = RegionSync(
        region, share_table(1, dict.fromkeys(uris, Fraction(1, len(uris)))), known, name
    )
    sync.start()
    sys.stdin.read()
    sync.close()


if __name__ == "__main__":
    main()
