"""Makes random defects: a seed chooses lines, and one change of each.

In Python, a change replaces a comparison, an operator, a number or a condition, or removes a
statement. In the C kernel it replaces a token, or removes a statement. Type annotations, texts, log
messages and the messages of errors are left alone. The same source and seed give the same defects.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.planted import ROOT, SOURCE, Mutant

SEED: Final = 29
# The folders, and the tests of each. The test file of the module itself runs first.
_CONFORMANCE: Final = ("tests/conformance", "tests/promises/test_never_over.py")
AREAS: Final[dict[str, tuple[str, ...]]] = {
    "core": ("tests/core", "tests/limiter", "tests/rules"),
    "decide": ("tests/decide", "tests/limiter", *_CONFORMANCE),
    "kernel": (
        "tests/decide/kernel",
        "tests/decide/stores/test_native.py",
        "tests/parity/test_kernel_parity.py",
        "tests/parity/test_allowances_parity.py",
        *_CONFORMANCE,
    ),
    "fleet": ("tests/fleet", "tests/limiter/test_consistency.py"),
    "regions": ("tests/regions", "tests/limiter/test_regions.py"),
    "rules": ("tests/rules", "tests/service/admin/test_rules.py"),
    "web": ("tests/web", "tests/test_asgi.py", "tests/test_fastapi.py", "tests/test_flask.py"),
    "control": ("tests/control", "tests/service/admin"),
}

_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_TOKENS: Final = (
    (re.compile(r" < "), " <= "),
    (re.compile(r" <= "), " < "),
    (re.compile(r" > "), " >= "),
    (re.compile(r" >= "), " > "),
    (re.compile(r" == "), " != "),
    (re.compile(r" != "), " == "),
    (re.compile(r" && "), " || "),
    (re.compile(r" \|\| "), " && "),
    (re.compile(r" \+ "), " - "),
    (re.compile(r" - "), " + "),
    (re.compile(r" \+= "), " -= "),
    (re.compile(r"\btrue\b"), "false"),
    (re.compile(r"\bfalse\b"), "true"),
    (re.compile(r"\b(?<![\w.])1\b"), "2"),
    (re.compile(r"\b(?<![\w.])0\b"), "1"),
    (re.compile(r"\bif \((?=.*\)$|.*\) \{$)"), "if (!"),
    (re.compile(r"^\s+[\w>.\[\]-]+(?: [|&+-]?= [^{}\"]*|\([^{}\"]*\));$"), "    ;"),
)


class _Change(NamedTuple):
    start: int
    end: int
    after: ast.expr | str


def sampled(count: int, seed: int = SEED) -> list[Mutant]:
    """Return `count` random defects, as many for each area; those of all areas by turns."""
    choice = random.Random(seed)
    found: list[tuple[int, Mutant]] = []
    for number, (area, tests) in enumerate(AREAS.items()):
        lines = _changes_by_line(area)
        wanted = count * (number + 1) // len(AREAS) - count * number // len(AREAS)
        some = choice.sample(sorted(lines), min(wanted, len(lines)))
        for turn, (path, line) in enumerate(some):
            start, end, changed = choice.choice(lines[path, line])
            after = changed if isinstance(changed, str) else f"({ast.unparse(changed)})"
            text = path.read_text()
            name = f"{area}/{path.relative_to(_folder(area)).as_posix()}:{line}"
            breaks = f"`{_brief(text[start:end])}` becomes `{_brief(after)}`"
            own = path.relative_to(SOURCE).with_name(f"test_{path.stem}.py")
            first = (f"tests/{own.as_posix()}",) if (ROOT / "tests" / own).exists() else ()
            mutant = Mutant(name, breaks, path, text[:start] + after + text[end:], first + tests)
            found.append((turn, mutant))
    return [mutant for _, mutant in sorted(found, key=itemgetter(0))]


def _folder(area: str) -> Path:
    return SOURCE / ("decide/kernel" if area == "kernel" else area)


def _changes_by_line(area: str) -> dict[tuple[Path, int], list[_Change]]:
    found: dict[tuple[Path, int], list[_Change]] = {}
    for path in sorted(_folder(area).rglob("*.c" if area == "kernel" else "*.py")):
        if "migrations" not in path.parts:
            text = path.read_text()
            for change in _in_c(text) if area == "kernel" else _in_python(text):
                line = text.count("\n", 0, change.start) + 1
                found.setdefault((path, line), []).append(change)
    return found


def _in_python(text: str) -> Iterator[_Change]:
    # The parser counts columns in bytes.
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = [line.encode() for line in text.splitlines()]

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1][:column].decode())

    for node, after in _of_tree(ast.parse(text)):
        end_line, end_column = node.end_lineno, node.end_col_offset
        assert end_line is not None
        assert end_column is not None
        yield _Change(place(node.lineno, node.col_offset), place(end_line, end_column), after)


def _of_tree(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | str]]:
    """Yield each part of a tree that can change, and the text in its place."""
    yield from _of_node(node)
    if isinstance(node, ast.JoinedStr | ast.Raise) or _logs(node):
        return
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns", "decorator_list", "type_params"}:
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, ast.AST):
                    yield from _of_tree(each)


def _of_node(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | str]]:
    match node:
        case ast.Compare(ops=[operator]):
            yield node, ast.Compare(node.left, [_COMPARED[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in _COMPUTED:
            yield node, ast.BinOp(node.left, _COMPUTED[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield node, ast.BoolOp(other, node.values)
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value)):
            yield node, repr(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, ast.UnaryOp(ast.Not(), test)
        case (
            ast.Raise()
            | ast.AugAssign()
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | ast.Expr(value=ast.Call() | ast.Await())
        ):
            if not _logs(node):
                yield node, "pass"


def _logs(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name.lower().strip("_") == "log"
    return False


def _in_c(text: str) -> Iterator[_Change]:
    start, comment = 0, False
    for line in text.splitlines(keepends=True):
        code = line.split("/*")[0].rstrip()
        if not comment and not line.startswith("#"):
            for pattern, after in _TOKENS:
                for match in pattern.finditer(code):
                    if after == "    ;" and match[0].count("(") != match[0].count(")"):
                        continue  # the end of a longer statement
                    yield _Change(start + match.start(), start + match.end(), after)
        comment = (comment or "/*" in line) and "*/" not in line
        start += len(line)


def _brief(text: str) -> str:
    return " ".join(text.split())[:100]
