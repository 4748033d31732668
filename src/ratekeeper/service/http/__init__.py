"""The HTTP service: checks for programs in any language, and the tokens that protect it.

In the order of a request: `app.py` routes it, `tokens.py` authenticates the caller, and
`checks.py`, `quotas.py`, `authorize.py` and `health.py` reply. `context.py` holds their
shared state, and `openapi.py` describes them.
"""
