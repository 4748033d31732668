"""One file per algorithm, each a table of times, costs and answers."""

import pytest

# The table's own assert shows the rows that differ.
pytest.register_assert_rewrite("tests.decide.algorithms.table")
