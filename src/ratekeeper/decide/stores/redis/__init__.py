"""Counts in Redis: one limit across every machine.

Read in this order:

    config         the URI and its options
    topology       where the servers are
    lua/           the scripts that run inside Redis
    codec          limits as bytes, and replies as decisions
    scripts        the calls of the scripts
    connections    sockets for threads, a pipelined connection for asyncio
    breakers       circuit breakers and their probes
    driver         calls carried out: send, retry, redirect
    denial_cache   checks that need no call
    batches        requests that share a call
    counters, store   the part that a limiter sees
    pubsub         messages between processes
    findings, health, audit
                   the part that an operator sees
"""
