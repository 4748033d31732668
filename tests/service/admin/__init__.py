"""The admin API, asked as an ASGI application, on a database of its own."""
