"""Tests of the admin API as an ASGI application, on a database of its own."""
