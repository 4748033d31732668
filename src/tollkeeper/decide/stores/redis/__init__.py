"""Quotas in Redis: one limit across every machine.

Read in this order: `config` and `options` (what the URI says), `topology` (where the servers are),
`lua/` (what runs inside them), `encode` and `codec` (limits as bytes, and answers as decisions),
`calls` (one call, and what to do when it is refused), `wire` and `wire_async` (connections),
`breakers` and `probes` (a server that fails is left alone), `drive` (calls carried out), `denied`
and `flights` (calls that are not made), `gates` and `store` (what a limiter sees), `health` and
`findings` (what an operator sees).
"""
