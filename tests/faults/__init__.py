"""Real servers that fail under a steady load, and a checker of every admission.

Each test breaks one thing while tasks and threads keep sending checks, and records every answer
(`load.py`). Afterwards `checker.py` verifies the bound of each algorithm in every interval, from
the measured times. Each test prints a line: the admitted units, the degraded ones among them, the
units over the limit with the reason, and the time until all decisions were exact again.
"""
