"""The scripts as a server knows them."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import cast

import pytest

from tests.redis_servers import Single, running
from tollkeeper.decide.stores.redis import scripts
from tollkeeper.decide.stores.redis.scripts import CHECK, GRANT, REFUND, RESET, Script

EVERY_SCRIPT = (CHECK, REFUND, GRANT, RESET)


@pytest.fixture
def server() -> Single:
    """The shared one."""
    return cast("Single", running("single"))


def test_every_script_has_its_own_name() -> None:
    """And the table here is complete."""
    assert len({script.sha for script in EVERY_SCRIPT}) == 4
    assert {each for each in vars(scripts).values() if isinstance(each, Script)} == set(
        EVERY_SCRIPT
    )


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_is_named_as_the_server_names_it(server: Single, script: Script) -> None:
    """By the SHA-1 of its text: else each call would go out twice."""
    assert server.admin.script_load(script.text) == script.sha.decode()
    assert script.sha == sha1(script.text).hexdigest().encode()


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_begins_with_what_all_have_in_common(script: Script) -> None:
    """The same text, and then its own."""
    folder = files("tollkeeper.decide.stores.redis").joinpath("lua")
    assert script.text.startswith(folder.joinpath("state.lua").read_bytes())


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_a_script_touches_its_key_and_nothing_else(server: Single, script: Script) -> None:
    """A user who may touch that key alone may run it: so it is right for a cluster too."""
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


def test_a_script_is_small_enough_to_go_along() -> None:
    """NOSCRIPT sends the whole text: that stays within a few packets."""
    assert max(len(script.text) for script in EVERY_SCRIPT) < 20_000
