"""The command `ratekeeper`, also as `python -m ratekeeper`."""

from __future__ import annotations

import sys

INTERRUPTED = 128 + 2  # how a shell reports a program that SIGINT ended


def main() -> None:
    """Run the command line. If a library is missing, print how to install it."""
    try:
        # Imported here: these libraries are an extra.
        from ratekeeper.cli.main import app  # noqa: PLC0415 - see above
    except KeyboardInterrupt:  # from here on, typer handles it
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ratekeeper":
            raise
        sys.exit(
            f"ratekeeper: the command line needs {error.name}, which is not installed; "
            f"install it with: pip install 'ratekeeper[cli]'"
        )
    app(prog_name="ratekeeper")


if __name__ == "__main__":
    main()
