"""Tests of the console without a browser, on the whole HTTP service and a database of its own."""
