"""Stage 5, record: what happened, counted and kept beside the path, which never waits for it.

`tally.py` and `histograms.py` are what grows on the path, `counters.py` says what it is called and
how the counts of several processes become one, `otel.py` tells it to OpenTelemetry.

`recorder.py` keeps decisions (`events.py`) and `usage.py`, and counts who asks most (`sketch.py`,
over workers by `live.py`); `sink.py` writes them to `tables.py`, `trimming.py` removes what is old,
and `reading.py` tells them.
"""
