"""Write a document as YAML, in one canonical form to show, compare and store.

Reading the result returns an equal document. Fields with their default value are left out, limits
are written as rates where a rate can express them, and lists have one entry per line. So two
versions differ only in the lines that changed.

The order matters, because the first rule, key or cost that matches applies. A database must
therefore store a document as text, or in a column type that preserves the order of keys.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from ratekeeper.core.errors import ConfigError
from ratekeeper.rules.document.grammar import to_data
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.tree import EXPONENT

_WIDTH: Final = 100


def to_yaml(document: Document) -> str:
    """Return the document as YAML, for `read`."""
    try:
        import yaml  # noqa: PLC0415 - an extra that plain data does not need
    except ImportError:
        raise ConfigError(
            "rule documents in YAML need PyYAML, which is not installed; "
            "install it with: pip install 'ratekeeper[rules]'"
        ) from None
    data = to_data(document)
    for name in {"allow", "deny"} & data.keys():
        data[name] = _Lines(data[name])
    text: str = yaml.dump(
        data,
        Dumper=_dumper(),
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=_WIDTH,
    )
    return text


class _Lines(list[str]):
    """A list that is written with one entry per line, however short it is."""


@cache
def _dumper() -> Any:
    import yaml  # noqa: PLC0415 - see above

    parent: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(parent):  # type: ignore[misc]  # one of two classes, chosen at run time
        """Writes no anchors, and `_Lines` with one entry per line."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - for every value
            return True

    # Text that the reader would take for a number must be quoted.
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-0123456789"))
    Dumper.add_representer(
        _Lines,
        lambda dumper, lines: dumper.represent_sequence(
            "tag:yaml.org,2002:seq", lines, flow_style=False
        ),
    )
    return Dumper
