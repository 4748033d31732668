"""The history: decisions and usage, recorded beside the path of a request, which never waits.

`recorder.py` notes what one worker decides and hands it to a thread. `events.py` turns it into rows
and adds up usage. `sink.py` writes them to `tables.py`, which also trims old rows. `reading.py`
queries them. `live.py` finds the busiest subjects of all workers of a machine.
"""
