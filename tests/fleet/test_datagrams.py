"""Tests of `tollkeeper.fleet.datagrams`."""
