"""The command `tollkeeper`, also as `python -m tollkeeper`."""

from __future__ import annotations

import sys

INTERRUPTED = 128 + 2  # how a shell reports a program that SIGINT ended


def main() -> None:
    """Run the command line. If a library is missing, print how to install it."""
    try:
        # Imported here: these libraries are an extra.
        from tollkeeper.cli.main import app  # noqa: PLC0415 - see above
    except KeyboardInterrupt:  # from here on, typer handles it
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tollkeeper":
            raise
        sys.exit(
            f"tollkeeper: the command line needs {error.name}, which is not installed; "
            f"install it with: pip install 'tollkeeper[cli]'"
        )
    app(prog_name="tollkeeper")


if __name__ == "__main__":
    main()
