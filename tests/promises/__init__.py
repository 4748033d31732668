"""What a decision promises, each promise a property, on every store.

A promise is tested with random limits, costs, keys and times. The examples are derived from the
test itself rather than from chance (`strategies.promise`): a run in CI that fails, fails again on
any machine, and a change is never blamed for an example that only today came up. To look further,
`TOLLKEEPER_EXPLORE=20 pytest tests/promises` tries 20 times as many, and new ones on every run.
"""
