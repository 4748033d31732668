"""Shapes: how a kind of value is read from a document, written to one, and described to editors.

`grammar.py` lists the fields of a rule document and gives each one a shape. The functions here make
the shapes that it uses: a text, a number, a list, a mapping with fixed fields (a record) and so on.
Each shape has one example, which is in its error messages and in the JSON Schema.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Final

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, quoted
from ratekeeper.core.model import duration_text
from ratekeeper.core.rates import parse_limit
from ratekeeper.rules.document.tree import KEY_LENGTH_MAX, DocumentPlace, suggestion

Json = dict[str, Any]

_PLAIN: Final = re.compile(r"[A-Za-z_/][\w/ .-]*|[0-9]+[a-z]+")
_DURATION: Final = re.compile(r"[0-9._]*\s*[A-Za-z]+")
# The JSON Schema of each shape that has a name, by which others refer to it.
DEFINITIONS: Final[dict[str, Json]] = {}


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class ValueShape:
    """A kind of value: its reader, its JSON Schema with an example, and its writer."""

    read: Callable[[DocumentPlace], Any]
    """Return the value. After a problem, it is a harmless value, or None if there is none."""
    schema: Json
    example: Any
    write: Callable[[Any], Any] = _same
    """Return plain data that `read` reads as an equal value."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a mapping: one row of the grammar."""

    name: str
    shape: ValueShape
    meaning: str
    """For the JSON Schema."""
    into: tuple[str, ...] | None = None
    """The attributes of the value that have the field's value; None: one of the same name."""
    required: bool = False

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes of the value that have the field's value."""
        return (self.name,) if self.into is None else self.into


def shown(example: Any) -> str:
    """Return an example as an author would write it in YAML, on one line.

    >>> shown({"id": "orders", "by": ["api_key"], "limits": ["10/second"]})
    '{id: orders, by: [api_key], limits: ["10/second"]}'
    """
    if isinstance(example, dict):
        return f"{{{', '.join(f'{shown(name)}: {shown(it)}' for name, it in example.items())}}}"
    if isinstance(example, list):
        return f"[{', '.join(map(shown, example))}]"
    plain = isinstance(example, str) and _PLAIN.fullmatch(example)
    return example if plain else json.dumps(example)


def named(name: str, meaning: str, shape: ValueShape) -> ValueShape:
    """Return the shape with a name in the JSON Schema, by which others refer to it."""
    DEFINITIONS[name] = {"description": meaning, **shape.schema, "examples": [shape.example]}
    return dataclasses.replace(shape, schema={"$ref": f"#/$defs/{name}"})


def passes(fail: Callable[[str], None], check: Callable[[Any], object], it: Any) -> bool:
    """Return whether a check accepts a value; if it raises ConfigError, report it with `fail`."""
    try:
        check(it)
    except ConfigError as error:
        fail(str(error))
        return False
    return True


# ------------------------------------------------------------------------------------- one value


def text(
    example: str, length_max: int, check: Callable[[str], object] = _same, pattern: str = ""
) -> ValueShape:
    """Return the shape of a text.

    `check`    raises ConfigError for a text that is not valid.
    `pattern`  the same for the JSON Schema, as far as an expression can say it.
    """
    hint = shown(example)

    def read(place: DocumentPlace) -> str:
        found = place.text(hint, length_max)
        return found if found and passes(place.fail, check, found) else ""

    schema: Json = {"type": "string", "minLength": 1, "maxLength": length_max}
    return ValueShape(read, schema | ({"pattern": pattern} if pattern else {}), example)


def choice(words: Sequence[str]) -> ValueShape:
    """Return the shape of one of some words; the first is the example."""

    def read(place: DocumentPlace) -> str:
        node = place.node
        # YAML reads `off` as false. If `off` is one of the words, the author meant the word.
        if node.kind in {"text", "boolean"} and node.text in words:
            return node.text
        if node.kind == "text":
            place.fail(f"unknown value {quoted(node.text)}; {suggestion(node.text, words)}")
        else:
            place.fail_kind(f"one of {', '.join(words)}", words[0])
        return words[0]

    return ValueShape(read, {"enum": list(words)}, words[0])


def whole(low: int, high: int, example: int) -> ValueShape:
    """Return the shape of a whole number."""
    hint = shown(example)
    return ValueShape(
        lambda place: place.whole(low, high, hint),
        {"type": "integer", "minimum": low, "maximum": high},
        example,
    )


def number(low: float, high: float, example: float) -> ValueShape:
    """Return the shape of a number, which is read as a float."""

    def read(place: DocumentPlace) -> float:
        value = place.node.value
        is_number = place.node.kind == "number" and isinstance(value, int | float)
        if is_number and low <= value <= high:  # excludes infinity and NaN
            return float(value)
        place.fail_kind(f"a number from {low:g} to {high:g}", shown(example))
        return high

    return ValueShape(read, {"type": "number", "minimum": low, "maximum": high}, example, plain)


def plain(value: float) -> float:
    """Return a whole number as an int."""
    return int(value) if value == int(value) else value


def seconds(example: str, low: float | None = None, high: float = 0.0) -> ValueShape:
    """Return the shape of a length of time in seconds: a number, or text such as `90s`."""
    what = "a length of time"
    if low is not None:
        least, most = (duration_text(int(each * NS_PER_SECOND)) for each in (low, high))
        what += f" from {least} to {most}" if low else f" of at most {most}"

    def read(place: DocumentPlace) -> float:
        found = _seconds(place)
        if found is None or (low is not None and not low <= found <= high):
            known = '60 (seconds), "90s", "1m" or "1h"' if low is None else example
            place.fail(f"{place.shown} is not {what}; for example {known}")
            return 0.0
        return found

    forms = [
        {"type": "number", "minimum": 0},
        {"type": "string", "pattern": "^[0-9._]*\\s*[A-Za-z]+$"},
    ]
    return ValueShape(read, {"anyOf": forms}, example, plain)


def _seconds(place: DocumentPlace) -> float | None:
    node = place.node
    if node.kind == "number" and isinstance(node.value, int | float) and node.value >= 0:
        return node.value
    if node.kind == "text" and _DURATION.fullmatch(node.value):
        try:
            return parse_limit(f"1/{node.value}").window
        except ConfigError:
            pass
    return None


# ----------------------------------------------------------------------------------- many values


def list_of(
    item: ValueShape,
    what: str,
    *,
    example: list[Any] | None = None,
    least: int = 0,
    most: int | None = None,
    single: bool = True,
    unique: str | None = None,
    unwrap: bool = False,
) -> ValueShape:
    """Return the shape of a list, which is read as a tuple without the items that have problems.

    `what`    the items, in words.
    `single`  one value counts as a list of one.
    `unique`  the attribute in which no two items may agree; empty: the item itself.
    `unwrap`  a list of one is written as that value.
    """
    the_example = [item.example] if example is None else example
    hint = shown(the_example)
    the_most = sys.maxsize if most is None else most
    allowed = f"{least} to {the_most:,} {what}" if least else f"at most {the_most:,} {what}"

    def read(place: DocumentPlace) -> tuple[Any, ...]:
        items = place.items(hint, single=single)
        if place.node.kind == "list" and not least <= len(items) <= the_most:
            place.fail(f"expected {allowed}, found {len(items):,}; for example {hint}")
            return ()
        found: list[Any] = []
        taken: set[str] = set()
        for at in items:
            value = item.read(at)
            if value is None or value == "":
                continue
            if unique is not None and (key := getattr(value, unique) if unique else value):
                if key in taken:
                    at.at(unique).fail(f"{quoted(key)} occurs twice; change or remove one")
                taken.add(key)
            found.append(value)
        return tuple(found)

    def write(values: Sequence[Any]) -> Any:
        written = [item.write(value) for value in values]
        return written[0] if unwrap and len(written) == 1 else written

    many: Json = {"type": "array", "items": item.schema}
    many |= {"minItems": least} if least else {}
    many |= {"maxItems": most} if most is not None else {}
    many |= {"uniqueItems": True} if unique == "" else {}
    schema = {"anyOf": [item.schema, many]} if single else many
    return ValueShape(read, schema, the_example, write)


def mapping_of(
    value: ValueShape, example: Json, check_name: Callable[[str], object], names: Json | None = None
) -> ValueShape:
    """Return the shape of a mapping whose names the author chooses, which is read as a dict.

    `check_name`  raises ConfigError for a name that is not valid, and `names` is its JSON Schema.
    """

    hint = shown(example)

    def read(place: DocumentPlace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, at in place.entries(hint).items():
            passes(at.fail_name, check_name, name)
            found[name] = value.read(at)
        return found

    def write(values: dict[str, Any]) -> Json:
        return {name: value.write(each) for name, each in values.items()}

    lengths = {"minLength": 1, "maxLength": KEY_LENGTH_MAX}
    schema = {
        "type": "object",
        "propertyNames": {**lengths, **(names or {})},
        "additionalProperties": value.schema,
    }
    return ValueShape(read, schema, example, write)


def record(
    of: type,
    example: Json,
    *rows: Field,
    build: Callable[..., Any] | None = None,
    check: Callable[[DocumentPlace, Any], None] | None = None,
    exactly_one: tuple[str, ...] = (),
) -> ValueShape:
    """Return the shape of a mapping with fixed fields, which is read as an object of a dataclass.

    `build`        makes the object; by default the class does.
    `check`        adds the problems between fields, if the fields by themselves have none.
    `exactly_one`  the fields of which there must be one.
    """
    found = _Record(of, example, rows, build or of, check, exactly_one)
    return ValueShape(found.read, found.schema(), example, found.write)


class _Record:
    """The rows of a mapping with fixed fields."""

    def __init__(
        self,
        of: type,
        example: Json,
        rows: Sequence[Field],
        build: Callable[..., Any],
        check: Callable[[DocumentPlace, Any], None] | None,
        exactly_one: Sequence[str],
    ) -> None:
        self._hint = shown(example)
        self._rows = {row.name: row for row in rows}
        self._required = [(row.name, shown(row.shape.example)) for row in rows if row.required]
        self._needed = {name for row in rows if row.required for name in row.attributes}
        self._build = build
        self._check = check
        self._exactly_one = exactly_one
        usual = _defaults(of)
        self._usual = {row.name: [usual.get(name) for name in row.attributes] for row in rows}

    def read(self, place: DocumentPlace) -> Any:
        """Return the value, without the fields that have problems; None if it needs one of them."""
        problems_before = place.problem_count
        values: Json = {}
        for name, at in self._fields(place).items():
            row = self._rows[name]
            value = row.shape.read(at)
            if value is None:
                continue
            if len(row.attributes) == 1:
                values[row.attributes[0]] = value
            elif row.attributes:
                values.update(zip(row.attributes, value, strict=True))
        is_clean = place.problem_count == problems_before
        if not self._needed <= values.keys():
            return None
        try:
            found = self._build(**values)
        except ConfigError as error:
            # The message starts with the name of the wrong field, if only one is wrong.
            if is_clean:
                place.at(str(error).partition("=")[0]).fail(str(error))
            return None
        if self._check is not None and is_clean:
            self._check(place, found)
        return found

    def _fields(self, place: DocumentPlace) -> dict[str, DocumentPlace]:
        """Return the fields that the mapping has; report unknown and missing ones."""
        found = place.entries(self._hint)
        unknown = [name for name in found if name not in self._rows]
        for name in unknown:
            hint = suggestion(name, self._rows)
            found.pop(name).fail_name(f"unknown field {quoted(name)}; {hint}")
        if place.node.kind != "mapping":
            return found
        place.require(found, *self._required)
        ones = self._exactly_one
        if ones and not unknown and len(found.keys() & {*ones}) != 1:
            names = f"{', '.join(ones[:-1])} or {ones[-1]}"
            place.fail(f"expected exactly one of {names}; for example {self._hint}")
        return found

    def write(self, value: Any) -> Json:
        """Return the fields that are required or do not have their default value."""
        found: Json = {}
        for name, row in self._rows.items():
            held = [getattr(value, each) for each in row.attributes]
            if row.required or held != self._usual[name]:
                found[name] = row.shape.write(held[0] if len(held) == 1 else held)
        return found

    def schema(self) -> Json:
        """Return the JSON Schema."""
        found: Json = {
            "type": "object",
            "additionalProperties": False,
            "required": [name for name, _ in self._required],
            "properties": {name: self._described(row) for name, row in self._rows.items()},
        }
        if self._exactly_one:
            found["oneOf"] = [{"required": [name]} for name in self._exactly_one]
        return found

    def _described(self, row: Field) -> Json:
        schema = {**row.shape.schema, "description": row.meaning}
        if "$ref" not in schema and "enum" not in schema:
            schema["examples"] = [row.shape.example]
        usual = self._usual[row.name]
        if usual and usual[0] and not row.required:
            written = row.shape.write(usual[0] if len(usual) == 1 else usual)
            if isinstance(written, str | int | float):
                schema["default"] = written
        return schema


def _defaults(of: type) -> Json:
    """Return the default values of a dataclass."""
    found: Json = {}
    for each in dataclasses.fields(of):
        if each.default is not MISSING:
            found[each.name] = each.default
        elif each.default_factory is not MISSING:
            found[each.name] = each.default_factory()
    return found
