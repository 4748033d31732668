"""Stage 5, record: what happened, counted and kept beside the path, which never waits for it.

`tally.py` and `histograms.py` are what grows on the path, `counters.py` says what it is called and
how the counts of several processes become one, `otel.py` tells it to OpenTelemetry.
"""
