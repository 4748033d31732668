"""The revisions of the schema. `schema.py` starts Alembic; there is no alembic.ini.

To change the schema, add a module to `versions` whose `down_revision` is the newest one there, and
change the tables in `schema.py` to match. A test compares the two on both engines.
"""
