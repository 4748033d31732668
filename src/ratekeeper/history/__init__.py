"""The history: decisions and usage, recorded beside the path of a request, which never waits.

`recorder.py` notes the decisions of one worker and hands them to a thread. `events.py` turns them
into rows and adds up usage. `sink.py` writes them to `tables.py`, which also trims old rows.
`reading.py` queries them. `live.py` finds the busiest subjects of all workers of a machine.
"""
