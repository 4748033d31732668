"""The three lines of the README work."""

from tollkeeper import Limiter


def test_the_third_of_two_is_denied() -> None:
    limiter = Limiter("2/minute")
    assert [bool(limiter.check("user:42")) for _ in range(3)] == [True, True, False]
