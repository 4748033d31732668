"""The control plane: the rules of a fleet, stored in versions and followed by every node."""
