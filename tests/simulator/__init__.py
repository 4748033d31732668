"""The simulator: fleets and regions with a virtual clock and network, and random faults."""
