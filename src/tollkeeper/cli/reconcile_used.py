"""Which rules have decided anything since a time, as the table of usage tells it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final

from tollkeeper.core.errors import ConfigError

_SQLITE: Final = "sqlite:///"
_RULES: Final = "SELECT DISTINCT rule FROM tollkeeper_usage WHERE start_s + step_s > :since"


async def rules_used(url: str, since: datetime) -> frozenset[str]:
    """The ids of rules that were met. Raises ConfigError, StoreError."""
    try:
        from sqlalchemy import text  # noqa: PLC0415 - an extra

        from tollkeeper.control.database import Database  # noqa: PLC0415 - as above
        from tollkeeper.history import tables  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tollkeeper":
            raise
        raise ConfigError(
            f"records in a database need {error.name}, which is not installed; "
            f"install it with: pip install 'tollkeeper[control]'"
        ) from None
    database = Database(url)
    if not database.is_postgresql:
        _refuse_missing(Path(database.name.removeprefix(_SQLITE)))
    try:
        async with database.reading() as connection:
            found = await tables.version(connection, is_postgresql=database.is_postgresql)
            if found is None:
                raise ConfigError(
                    f"--records: {database.name} holds no records; correct the URL, or start the "
                    f"service with --record"
                )
            tables.check_version(found, database.name)
            rows = await connection.execute(text(_RULES), {"since": int(since.timestamp())})
            return frozenset(map(str, rows.scalars()))
    finally:
        await database.close()


def _refuse_missing(file: Path) -> None:
    """To open it would make it."""
    if not file.exists():
        raise ConfigError(f"--records: there is no file {file}; correct the URL")
