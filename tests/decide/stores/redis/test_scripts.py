"""The scripts, as a server sees them, and the keys of their calls."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import cast

import pytest

from tests.redis_servers import Single, running
from tollkeeper.decide.stores.redis import scripts
from tollkeeper.decide.stores.redis.scripts import (
    CHECK,
    GRANT,
    JOINT_CHECK,
    REFUND,
    RESET,
    LuaScript,
)

EVERY_SCRIPT = (CHECK, REFUND, GRANT, RESET)


@pytest.fixture
def server() -> Single:
    """Return the shared server."""
    return cast("Single", running("single"))


def test_every_script_has_its_own_name() -> None:
    """The names are unique, and this file tests all scripts."""
    every = {each for each in vars(scripts).values() if isinstance(each, LuaScript)}
    assert every == {*EVERY_SCRIPT, JOINT_CHECK}
    assert len({script.sha for script in every}) == 5


def test_the_script_for_several_subjects_contains_the_script_for_one() -> None:
    """So both decide alike."""
    assert CHECK.text in JOINT_CHECK.text


@pytest.mark.parametrize("script", [*EVERY_SCRIPT, JOINT_CHECK])
def test_a_script_has_the_sha_that_the_server_computes(server: Single, script: LuaScript) -> None:
    """With a wrong SHA, the client would send each call twice."""
    assert server.admin.script_load(script.text) == script.sha.decode()
    assert script.sha == sha1(script.text).hexdigest().encode()


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_begins_with_the_shared_functions(script: LuaScript) -> None:
    """The script's own text follows the shared functions. Comments are not sent."""
    folder = files("tollkeeper.decide.stores.redis").joinpath("lua")
    lines = folder.joinpath("state.lua").read_bytes().splitlines()
    code = [line.strip() for line in lines if not line.lstrip().startswith(b"--")]
    assert script.text.startswith(b"\n".join(filter(None, code)))


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_accesses_only_its_key(server: Single, script: LuaScript) -> None:
    """A user with access to that key alone may run it, so it works in a cluster."""
    admin = server.admin
    admin.script_load(script.text)
    rights = ("resetkeys", "~tk:{only}", "+@all", "nopass", "on")
    admin.execute_command("ACL", "SETUSER", "narrow", *rights)
    try:
        with server.client(username="narrow", password="any") as narrow:
            gate = b"\xdc\x00\x08\xa4rule" + bytes((1, 2, 100, 100, 60, 60, 60))
            arguments = (gate, 1, "", "", 10)
            if script is CHECK:
                arguments = (gate, 1)
            elif script is REFUND:
                arguments = (gate, 1, "")
            narrow.evalsha(script.sha.decode(), 1, "tk:{only}", *arguments)
    finally:
        admin.execute_command("ACL", "DELUSER", "narrow")
        admin.delete("tk:{only}")


def test_a_script_is_small_enough_to_send_with_a_call() -> None:
    """Redis accepts at most 16 KiB in one argument from a client that is not logged in."""
    assert max(len(script.text) for script in (*EVERY_SCRIPT, JOINT_CHECK)) < 16_384
