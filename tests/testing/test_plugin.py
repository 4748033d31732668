"""The pytest plugin, tested by running pytest inside pytest."""

from __future__ import annotations

import pytest

from ratekeeper.core import switches

MODULE = """
    from ratekeeper import Limiter

    limiter = Limiter("1/minute")  # at import time, out of the test's reach
"""


def _run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run pytest without the asyncio plugin, which requires configuration."""
    return pytester.runpytest_inprocess("-p", "no:asyncio", *options)


def test_the_fixtures_are_available_without_setup(pytester: pytest.Pytester) -> None:
    """The package installs them, and pytest lists each with a description."""
    result = _run(pytester, "--fixtures")
    result.stdout.fnmatch_lines_random(
        [
            "ratekeeper_clock*",
            "*Replace the system clock by a*",
            "ratekeeper_fresh*",
            "*Forget the counts of every*",
            "ratekeeper_off*",
            "*Turn limiting off: every*",
        ]
    )


def test_the_clock_fixture(pytester: pytest.Pytester) -> None:
    """A test moves time by hand; the next test is back on the real clock."""
    pytester.makepyfile(
        MODULE
        + """
    def test_denied_until_a_minute_later(ratekeeper_clock):
        assert limiter.check("me")
        assert not limiter.check("me")
        ratekeeper_clock.advance(60)
        assert limiter.check("me")

    def test_after_it_time_is_real():
        from ratekeeper.core.clock import SystemClock
        assert SystemClock().now_ns() > 1_700_000_000 * 10**9
    """
    )
    _run(pytester).assert_outcomes(passed=2)
    assert switches.clock is None


APPLICATION = """
    from flask import Flask
    from ratekeeper.flask import RateLimit

    RULES = '''
    version: 1
    rules:
      - id: all
        match: {}
        by: user
        limits: 2/minute
        penalty: {after: 1, within: 1m, cooldown: 1h, block_after: 3}
    '''
    app = Flask("shop")
    app.add_url_rule("/", view_func=lambda: "home")
    RateLimit(app, rules=RULES, identify={"user": "header:X-User"})

    def spend():
        client = app.test_client()
        return [client.get("/", headers={"X-User": "ann"}).status_code for _ in range(5)]
"""


@pytest.mark.parametrize("fixture", ["ratekeeper_clock", "ratekeeper_fresh"])
def test_each_test_starts_with_fresh_counts(pytester: pytest.Pytester, fixture: str) -> None:
    """Defect: the application's limiter kept the counts and cool-downs of the test before."""
    pytester.makepyfile(
        APPLICATION
        + f"""
    def test_one({fixture}):
        assert spend() == [200, 200, 429, 429, 429]

    def test_two({fixture}):
        assert spend() == [200, 200, 429, 429, 429]

    def test_it_leaves_no_counts_behind():
        assert spend() == [200, 200, 429, 429, 429]

    def test_after_counts_of_the_real_time({fixture}):
        assert spend() == [200, 200, 429, 429, 429]
    """
    )
    _run(pytester).assert_outcomes(passed=4)


def test_each_test_starts_without_pauses_of_servers(pytester: pytest.Pytester) -> None:
    """Defect: a transport kept the `Retry-After` of the test before, in the time of its clock."""
    pytester.makepyfile(
        """
    import httpx, pytest
    from ratekeeper.httpx import LimitTransport, RetryTransport

    BUSY = httpx.MockTransport(lambda request: httpx.Response(429, headers={"Retry-After": "60"}))
    TRANSPORTS = [
        kind(transport=BUSY, attempts_max=1, wait_max=1)
        for kind in (RetryTransport, lambda **settings: LimitTransport("9/second", **settings))
    ]

    @pytest.mark.parametrize("transport", TRANSPORTS)
    @pytest.mark.parametrize("number", [1, 2])
    def test_one(transport, number, ratekeeper_clock):
        assert transport.handle_request(httpx.Request("GET", "http://a.test")).status_code == 429
    """
    )
    _run(pytester).assert_outcomes(passed=4)


def test_all_tests_can_start_with_fresh_counts(pytester: pytest.Pytester) -> None:
    """pytest's own setting `usefixtures` applies the fixture to each test."""
    pytester.makeini("[pytest]\nusefixtures = ratekeeper_fresh")
    pytester.makepyfile(
        MODULE
        + """
    import pytest

    @pytest.mark.parametrize("number", [1, 2])
    def test_one(number):
        assert [bool(limiter.check("me")) for _ in range(2)] == [True, False]
    """
    )
    _run(pytester).assert_outcomes(passed=2)


def test_the_off_fixture(pytester: pytest.Pytester) -> None:
    """A test that uses the fixture is not limited; the next test is."""
    pytester.makepyfile(
        MODULE
        + """
    def test_unlimited(ratekeeper_off):
        assert all(limiter.check("me") for _ in range(100))

    def test_limited_again():
        assert [bool(limiter.check("me")) for _ in range(2)] == [True, False]
    """
    )
    _run(pytester).assert_outcomes(passed=2)
    assert not switches.limiting_off


def test_the_fixtures_clean_up_after_a_failing_test(pytester: pytest.Pytester) -> None:
    """The next test has the real clock and limits."""
    pytester.makepyfile(
        """
    def test_fails(ratekeeper_clock, ratekeeper_off):
        assert False
    """
    )
    _run(pytester).assert_outcomes(failed=1)
    assert switches.clock is None
    assert not switches.limiting_off
