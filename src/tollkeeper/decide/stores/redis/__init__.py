"""Quotas in Redis: one limit across every machine.

Read in this order: `config` (what the URI says), `topology` (where the servers are), `lua/` (what
runs inside them), `codec` (limits and answers as bytes), `calls` (one call, and what to do when it
is refused), `wire` and `wire_async` (connections), `drive` (calls carried out), `gates` and `store`
(what a limiter sees), `health` and `findings` (what an operator sees).
"""
