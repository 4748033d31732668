"""The service: checks over HTTP for everything that is not Python, and the tokens that it asks for.

In the order of a request: `app.py` routes it, `wire.py` reads and writes its JSON, `checks.py`,
`quotas.py` and `authorize.py` answer it, `replies.py` sends what is answered. `tokens.py` says who
may ask for what, `node.py` is what they all share, `metrics.py` counts.
"""
