"""`tollkeeper rules`: look at rule documents, compare them, put them in force, and explain them.

Here are the commands that need no database: `validate`, `show`, `diff`, `schema`. Those on versions
are in `rules_change.py`, `explain` in `rules_explain.py`. `rules_read.py` finds the documents, and
`rules_print.py` prints and says what the exit codes mean.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from tollkeeper.cli import rules_print as out
from tollkeeper.cli.rules_change import apply, history, rollback
from tollkeeper.cli.rules_explain import explain
from tollkeeper.cli.rules_options import (
    Command,
    DatabaseOption,
    Group,
    JsonOption,
    MaybeFile,
    was_typed,
)
from tollkeeper.cli.rules_read import (
    STDIN,
    Positions,
    Source,
    Unreadable,
    from_database,
    from_either,
    from_file,
)
from tollkeeper.control.edits import unified_diff
from tollkeeper.core.errors import ConfigError
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import DocumentError
from tollkeeper.rules.document.reading import schema as document_schema
from tollkeeper.rules.document.safety import findings
from tollkeeper.rules.document.tree import DocumentProblem
from tollkeeper.rules.document.writing import to_data

app: Final = typer.Typer(
    cls=Group,
    help="Rule documents: check, compare, apply and explain them. Exit codes: 0 fine, 1 problems "
    "or differences, 2 it could not be done, 3 somebody else changed the rules meanwhile.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Tracebacks that show variables would show passwords.
    pretty_exceptions_enable=False,
)

# No version has more, and int() of a million digits takes seconds.
_DIGITS_MAX: Final = 10


@app.command(cls=Command)
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Rule documents; - is the standard input.")
    ],
    strict: Annotated[bool, typer.Option("--strict", help="Take warnings for problems.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with rule documents: each problem on a line, with file, line and column.

    Warnings are about documents that can be used but most likely do what nobody wants, such as
    denying everyone; `apply` refuses those.

    Exit code: 0 fine, or only warnings; 1 problems; 2 a file cannot be read.

    Example: tollkeeper rules validate --strict limits.yaml

    Example: generate-limits | tollkeeper rules validate -
    """
    with out.telling(as_json):
        if files.count(STDIN) > 1:
            raise ConfigError("the standard input can be read once; give - once")
        checked = [_Checked(file) for file in files]
        code = max(each.exit_code(strict) for each in checked)
        if as_json:
            out.say_json({"exit_code": code, "files": [each.data() for each in checked]})
        else:
            for each in checked:
                each.say(strict)
        raise typer.Exit(code)


class _Checked:
    """One file, and what is wrong with it."""

    def __init__(self, file: str) -> None:
        self.name = file
        self.unreadable = ""
        self.problems: tuple[DocumentProblem, ...] = ()
        self.warnings: list[dict[str, Any]] = []
        self.rules = 0
        try:
            source = from_file(file)
            self.name = source.name
            document = source.document()
        except Unreadable as error:
            self.unreadable = str(error)
        except DocumentError as error:
            self.problems = error.problems
        else:
            self.rules = len(document.rules)
            self._warn(source, document)

    def _warn(self, source: Source, document: Document) -> None:
        found = findings(document)
        # Parsed again for that, because a document does not remember where it stood.
        positions = Positions(source.text if found else "")
        for finding in found:
            line, column = positions.of(finding.where)
            text = out.finding_text(finding)
            self.warnings.append({"line": line, "column": column, "text": text, **asdict(finding)})

    def exit_code(self, strict: bool) -> int:
        if self.unreadable:
            return out.TROUBLE
        return out.PROBLEMS if self.problems or (strict and self.warnings) else out.OK

    def data(self) -> dict[str, object]:
        return {
            "file": self.name,
            "error": self.unreadable or None,
            "problems": [asdict(problem) for problem in self.problems],
            "warnings": self.warnings,
        }

    def say(self, strict: bool) -> None:
        if self.unreadable:
            out.say(f"tollkeeper: {self.unreadable}", to_stderr=True)
        for problem in self.problems:
            out.say(str(problem))
        for each in self.warnings:
            level = "" if strict else "warning: "
            out.say(f"{self.name}:{each['line']}:{each['column']}: {level}{each['text']}")
        if self.exit_code(strict) == out.OK:
            out.say(f"{self.name}: ok, rules: {self.rules}, warnings: {len(self.warnings)}")


@app.command(cls=Command)
def show(
    context: typer.Context,
    file: MaybeFile = None,
    database: DatabaseOption = None,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="Not the current one, but this.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a document as Tollkeeper writes it: from a FILE or, without one, from the database.

    The same rules always give the same text. A FILE goes before TOLLKEEPER_DATABASE.

    Exit code: 0 fine; 1 the document has problems; 2 it cannot be read.

    Example: tollkeeper rules show limits.yaml

    Example: tollkeeper rules show --database sqlite:///rules.db --version 3
    """
    with out.telling(as_json):
        if version is None:
            source = from_either(file, database, url_was_typed=was_typed(context, "database"))
        elif file is None:
            source = from_database(database, version)
        else:
            raise ConfigError("--version is one of the database; a FILE has none")
        if as_json:
            out.say_json(to_data(source.document()))
        else:
            out.say(source.canonical().removesuffix("\n"))


@app.command(cls=Command)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A FILE, or the number of a version.")],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="The same; without it, the current version.")
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what differs between two documents, as a unified diff of their canonical texts.

    A number is a version in the database; a file with such a name is ./7. `diff FILE` says what
    applying it would change, and `diff N` what has changed since.

    Exit code, as of diff(1): 0 they are equal; 1 they differ; 2 trouble.

    Example: tollkeeper rules diff old.yaml new.yaml

    Example: tollkeeper rules diff limits.yaml --database sqlite:///rules.db
    """
    with out.telling(as_json, problems=out.TROUBLE):
        old = _either(a, database)
        if b is not None:
            new = _either(b, database)
        elif old.number is None:
            old, new = from_database(database), old
        else:
            new = from_database(database)
        text = unified_diff(old.canonical(), new.canonical(), old.name, new.name)
        if as_json:
            out.say_json({"a": old.name, "b": new.name, "equal": not text, "diff": text})
        elif text:
            out.say(text)
        raise typer.Exit(1 if text else 0)


def _either(name: str, database: str | None) -> Source:
    is_number = name.isascii() and name.isdigit() and len(name) <= _DIGITS_MAX
    return from_database(database, int(name)) if is_number else from_file(name)


@app.command(cls=Command)
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="It is JSON in any case.")] = True,
) -> None:
    """Print the JSON Schema of rule documents, for editors that complete and check them.

    Exit code: 0.

    Example: tollkeeper rules schema > rules.schema.json
    """
    with out.telling(as_json):
        out.say_json(document_schema())


for command in (history, apply, rollback, explain):
    app.command(cls=Command)(command)
