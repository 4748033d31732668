"""Small defects, planted one at a time in a copy of the source, to try the tests themselves."""
