"""The control plane: the rules of a fleet, kept in versions, changed by many, lost by nobody."""
