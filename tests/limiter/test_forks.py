"""A process that forks while its threads check: no child hangs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PYTHON = """
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.stores.memory import PythonMemoryStore
limiter = Limiter("5/hour", store=PythonMemoryStore(SystemClock()))
ask = lambda i: limiter.check(f"user:{i % 50}")
"""
PENALTIES = """
limiter = Limiter.from_rules('''
version: 1
rules:
  - {id: a, by: user, limits: 1/hour, penalty: {after: 3, within: 1m, cooldown: 10s}}
''')
ask = lambda i: limiter.check(Request(user=f"u{i % 50}"))
"""
# Threads take turns after every microsecond, so nearly every fork is inside a check.
SCRIPT = """
import os, signal, sys, threading
from ratekeeper import Limiter, Request
sys.setswitchinterval(1e-6)
%s
def work():
    for i in range(10**9):
        ask(i)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for _ in range(40):
    child = os.fork()
    if not child:
        signal.alarm(30)
        for i in range(50):
            ask(i)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("a child hangs")
        break
os._exit(0)
"""


@pytest.mark.parametrize("limiter", [PYTHON, PENALTIES], ids=["python", "penalties"])
def test_a_child_that_is_forked_during_a_check_can_check(limiter: str) -> None:
    """The locks of the store in Python and of the penalties are free in it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % limiter],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2_000:]
