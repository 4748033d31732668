"""The scripts, as a server sees them, and the keys of their calls."""

from __future__ import annotations

import re
from hashlib import sha1
from importlib.resources import files
from typing import cast

import pytest

from ratekeeper import Limit
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.model import UNITS_MAX, AlgorithmName
from ratekeeper.decide.stores.redis import scripts
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.scripts import (
    CELL,
    CHANGE,
    CHANGE_SLOTS,
    COUNTS,
    LEASES,
    LOGS,
    MARKS,
    OWE,
    OWE_LOGS,
    REFUND,
    SERVER_TIME,
    SLOTS,
    LuaScript,
    RuleScripts,
    ScriptCharge,
    batch_call,
)
from tests.redis_servers import Single, running

CHECKS = (COUNTS, LOGS, SLOTS, LEASES)
EVERY_SCRIPT = (*CHECKS, CHANGE, CHANGE_SLOTS, REFUND, OWE, OWE_LOGS)
OTHERS = (CELL, MARKS)
REGIONAL = tuple(
    found
    for name, found in vars(scripts).items()
    if name.startswith("REGIONAL_") and isinstance(found, LuaScript)
)


@pytest.fixture
def server() -> Single:
    """Return the shared server."""
    return cast("Single", running("single"))


def test_every_script_has_its_own_name() -> None:
    """The names are unique, and this file tests all scripts."""
    every = {each for each in vars(scripts).values() if isinstance(each, LuaScript)}
    assert every == {*EVERY_SCRIPT, *OTHERS, *REGIONAL}
    assert len({script.sha for script in every}) == len(EVERY_SCRIPT) + len(OTHERS) + len(REGIONAL)


@pytest.mark.parametrize("script", [*EVERY_SCRIPT, *OTHERS, *REGIONAL])
def test_a_script_has_the_sha_that_the_server_computes(server: Single, script: LuaScript) -> None:
    """With a wrong SHA, the client would send each call twice."""
    assert server.admin.script_load(script.text) == script.sha.decode()
    assert script.sha == sha1(script.text).hexdigest().encode()


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_begins_with_the_shared_functions(script: LuaScript) -> None:
    """The script's own text follows the shared functions. Comments and indents are not sent."""
    lines = script.text.splitlines()
    assert lines[0].endswith(b"=redis.call,math.floor,math.ceil,math.max,math.min")
    assert not [line for line in lines if line != line.strip() or line.startswith(b"--")]


@pytest.mark.parametrize("script", [*EVERY_SCRIPT, *OTHERS, *REGIONAL])
def test_library_functions_keep_their_names(script: LuaScript) -> None:
    """A local variable with the name of one would give the function its short name."""
    called = set(re.findall(rb"\b(?:string|struct|table|math|cmsgpack|redis)\.(\w+)", script.text))
    known = b"byte char find format gmatch gsub huge len rep sub pack unpack unpack_limit size "
    known += b"concat insert remove sort ceil floor max min call pcall error_reply sha1hex"
    assert called <= set(known.split())


def test_texts_in_scripts_keep_their_spaces() -> None:
    """Spaces are removed around operators, and no text contains an operator between spaces."""
    texts = re.compile(rb"'[^'\n]*'")
    folder = files("ratekeeper.decide.stores.redis").joinpath("lua")
    sources = b"".join(
        line
        for each in folder.iterdir()
        for line in each.read_bytes().splitlines(keepends=True)
        if not line.lstrip().startswith(b"--")
    )
    sent = b"\n".join(script.text for script in (*EVERY_SCRIPT, *OTHERS, *REGIONAL))
    assert set(texts.findall(sent)) <= set(texts.findall(sources))


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_accesses_only_its_key(server: Single, script: LuaScript) -> None:
    """A user with access to that key alone may run it, so it works in a cluster."""
    admin = server.admin
    admin.script_load(script.text)
    rights = ("resetkeys", "~rk:{only}", "+@all", "nopass", "on")
    admin.execute_command("ACL", "SETUSER", "narrow", *rights)
    try:
        with server.client(username="narrow", password="any") as narrow:
            gate = b"\xa8rule678" + b"9" + bytes((1, 2, 100, 100, 60, 60, 60, 1, 100))
            grant = bytes((5, 1, 0, 100))
            argument = grant if script in {CHANGE, REFUND} else 1
            narrow.evalsha(script.sha.decode(), 1, "rk:{only}", gate, argument)
    finally:
        admin.execute_command("ACL", "DELUSER", "narrow")
        admin.delete("rk:{only}")


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_is_small_enough(script: LuaScript) -> None:
    """Redis accepts at most 16 KiB in one argument from a client that is not logged in."""
    assert len(script.text) < 16_384


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
@pytest.mark.parametrize("spend", [True, False])
@pytest.mark.parametrize("cost", [0, 1, 12_345, UNITS_MAX])
def test_the_command_of_one_check_is_that_of_its_batch(
    algorithm: AlgorithmName, cost: int, *, spend: bool
) -> None:
    """Byte for byte; it is written without making the call."""
    limits = (Limit(5, per=60, algorithm=algorithm),)
    rule = RuleScripts(limits, "rule", parse("redis://localhost"), SystemClock())
    call = batch_call([[ScriptCharge(rule, "user:42", cost)]], SERVER_TIME, spend=spend)
    assert rule.check_command("user:42", cost, spend=spend) == (call.key, call.by_sha())
