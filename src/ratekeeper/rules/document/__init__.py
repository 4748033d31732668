"""The rule document: read, checked and written."""
