"""One file per algorithm, each a table of times, costs and answers."""

import pytest

# The assertion of the table shows the rows that differ.
pytest.register_assert_rewrite("tests.decide.algorithms.table")
