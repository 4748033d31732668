"""The promises of a decision, each tested as a property on every store.

A promise is tested with random limits, costs, keys and times. The examples are derived from the
test itself and not from chance (`strategies.promise`). A failure in CI therefore fails again on any
machine, and no change is blamed for an example that came up by chance. To search further,
`RATEKEEPER_EXPLORE=20 pytest tests/promises` runs 20 times as many examples, and new ones on every
run.
"""
