"""The schema's revisions, as Alembic runs them. `schema.py` starts it; there is no alembic.ini.

To change the schema, add a module to `versions` whose `down_revision` is the newest one there, and
change `tables.py` to match. A test compares the two on both engines.
"""
