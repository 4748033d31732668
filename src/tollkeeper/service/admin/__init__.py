"""The admin API: the rules of a fleet and the quotas of a node, over HTTP.

In the order of a request: `asking.py` lets it in (token, size, JSON, conditions), `rules.py`,
`subjects.py`, `versions.py` and `quotas.py` answer it, with the values of `models.py`; `plane.py`
is what they ask, `answering.py` what they have in common; `problems.py` says what went wrong;
`api.py` puts them together, and `page.py` shows them.
"""
