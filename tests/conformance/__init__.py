"""One suite that every store passes. The stores are listed in `stores.py`."""
