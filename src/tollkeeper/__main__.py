"""`python -m tollkeeper`, which is also the command `tollkeeper`."""

from __future__ import annotations

import sys

INTERRUPTED = 128 + 2  # what a shell says of a program that SIGINT ended


def main() -> None:
    """Run the command line; without its libraries, say how to get them."""
    try:
        # Imported here: these libraries are an extra, which a service does without.
        from tollkeeper.cli.main import app  # noqa: PLC0415 - see above
    except KeyboardInterrupt:  # later, typer sees to it
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
