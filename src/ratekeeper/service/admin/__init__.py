"""The admin API: the rules of a fleet and the quotas of a node, over HTTP.

In the order of a request: `api.py` is the application, `operations.py` authenticates the caller and
reads the request, `rules.py`, `subjects.py`, `quotas.py` and `records.py` hold the operations,
`control.py` reads and changes the rules, and `problems.py` describes errors. `page.py` is /docs.
"""
