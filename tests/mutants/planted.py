"""Reads the planted defects: `core.toml` has those of src/ratekeeper/core, and so on.

Each table is one defect. Its name is that of the table, after the file's: `core/rate-rounds-up`.

    breaks  what a user would notice
    file    the file beneath src/ratekeeper
    before  the text to replace, which occurs exactly once in the file
    after   the defect
    tests   the test files that must fail; of a slow file, one test: `file::test`

There are no line numbers, so most changes of the source leave the defects as they are. When the
text of one moves or goes away, `test_planted.py` fails until the defect follows, or another one
takes its place.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src/ratekeeper"


class Mutant(NamedTuple):
    """One defect: the whole text of the file that has it, and the tests that should fail."""

    name: str
    breaks: str
    path: Path
    text: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        """The folder that it counts for in the table."""
        return self.name.partition("/")[0]


def planted() -> list[Mutant]:
    """Return all planted defects. Raises ValueError for one whose text is not in its file once."""
    found = []
    for table in sorted(Path(__file__).parent.glob("*.toml")):
        for name, fields in tomllib.loads(table.read_text()).items():
            path = SOURCE / fields["file"]
            text, before = path.read_text(), fields["before"]
            if text.count(before) != 1:
                raise ValueError(
                    f"{table.name}: the text of [{name}] occurs {text.count(before)} times in "
                    f"{fields['file']}, not once; let it follow the source: {before!r}"
                )
            found.append(
                Mutant(
                    f"{table.stem}/{name}",
                    fields["breaks"],
                    path,
                    text.replace(before, fields["after"]),
                    tuple(fields["tests"]),
                )
            )
    return found
