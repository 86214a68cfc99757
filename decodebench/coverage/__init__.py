"""What decode will read against what was written, from block ids and from bytes.

    audit(cache, batch, values, report).verdict     # every byte of a cache that was poisoned and filled
    plan_audit(layout, batch, ids)                 # block ids alone, nothing allocated
    cost_findings(scheduler, worker)                # right bytes at a wrong cost

Two sources, which must agree: the *plan* (which blocks a fill says it wrote) and the *bytes* (poison
the cache, fill, read every byte back). What decode reads is derived here from each layer's own
spec and the block tables, on another way than the connector takes.

A page is a block of one layer. Required pages end up in one of four states: ``filled``
(exactly the values asked for), ``zeroed`` (on purpose: packed formats and circular buffers, which
hold no plain numbers), ``wrong`` (other bytes), ``uncovered`` (nobody wrote it, or zeros that
nobody asked for). Coverage counts the first two. Beside them, pages that should not have been
touched: ``stray`` (written, owned by nobody in this batch, the null block among them, or holding
nothing to stand in for) and ``clobbered`` (written over what another group or a shared prefix
owns). Groups alias the same bytes, so ownership is per (pool, block id), and every byte is judged
through the group that owns its block.

May use: ``models``, ``layout``, ``cache``.
"""
