"""A fleet: many nodes that share limits and answer most checks themselves."""
