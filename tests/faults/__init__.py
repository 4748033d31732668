"""Real servers that fail under a steady load, and a checker of every admission.

Each test breaks one thing while tasks and threads go on asking, and writes down every answer
(`load.py`). Afterwards `checker.py` holds the bound of each algorithm against every interval, from
the times that were measured. Each prints a line: what was admitted, what of it was degraded, by how
many units the limits were exceeded and why, and how long it took until all was exact again.
"""
