"""Settings for the whole suite."""

from hypothesis import HealthCheck, settings

# The plugin that runs pytest inside pytest, for the tests of our own fixtures.
pytest_plugins = ["pytester"]

# No property may fail because the machine was busy: a deadline is a timing assertion.
settings.register_profile(
    "tollkeeper", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("tollkeeper")
