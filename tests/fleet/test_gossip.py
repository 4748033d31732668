"""Tests of `tollkeeper.fleet.gossip`."""
