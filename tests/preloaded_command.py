"""A `ratekeeper` whose modules are imported once, for a test that runs a hundred commands.

    with PreloadedCommand() as command:
        subprocess.run(["ratekeeper", "--version"], env={"PATH": str(command.folder)})

Each start of the installed command takes 0.3 s of processor time for imports. This server has done
them, and forks for each call. The program in `folder` passes its arguments, its variables, its
folder and its three standard files to the server, and exits with the exit code of the fork. It does
not pass on signals.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path

from ratekeeper import __main__ as command
from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import Startable
from tests.redis_servers.waiting import until

READY_SECONDS_MAX = 60.0
# The larger modules that commands import only when they run.
_IMPORTED_LATE = ("httpx", "pydantic.type_adapter", "ratekeeper.control.repository")
_FILES = 3
_SIZE_BYTES = 4
# Without the modules of the environment, Python starts in 10 ms.
_CLIENT = """#!{python} -IS
import json, os, socket, sys
call = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [len(call).to_bytes({size}, "big")], range({files}))
    server.sendall(call)
    sys.exit(int(server.recv({size})))
"""


class PreloadedCommand(Startable):
    """The server, started and stopped by a `with` block."""

    def __init__(self) -> None:
        self.folder = scratch().new_folder("command")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it accepts calls."""
        path = self.folder / "socket"
        program = self.folder / "ratekeeper"
        client = {"python": sys.executable, "size": _SIZE_BYTES, "files": _FILES}
        program.write_text(_CLIENT.format(path=str(path), **client), encoding="utf-8")
        program.chmod(0o755)
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            process_group=scratch().process_group,
        )
        until(
            lambda: process.poll() is not None or path.exists(),
            "the commands are imported",
            READY_SECONDS_MAX,
        )
        assert process.poll() is None, "the server of commands did not start"

    def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def serve(path: Path) -> None:
    """Import all commands, and run each call in a process of its own, until a signal."""
    sys.argv = ["ratekeeper", "--help"]
    with redirect_stdout(StringIO()), suppress(SystemExit):
        command.main()
    for name in _IMPORTED_LATE:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen()
        Path(f"{path}.new").rename(path)
        while True:
            caller, _ = server.accept()
            with caller:
                if os.fork() == 0:
                    answer(caller)


def answer(caller: socket.socket) -> None:
    """Run a call in a fork, and send its exit code."""
    size, files, _, _ = socket.recv_fds(caller, _SIZE_BYTES, _FILES)
    call = caller.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (child := os.fork()) == 0:
        run(call, files)
    for each in files:
        os.close(each)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    caller.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def run(call: bytes, files: list[int]) -> None:
    """Run a call in this process, and exit."""
    sys.argv, variables, folder = json.loads(call)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    code: object = 0
    try:
        command.main()
    except SystemExit as ended:
        code = ended.code or 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The regular end of the interpreter takes as long as a command.
    os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
