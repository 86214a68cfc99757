"""Many cases, one table: grids, journals, sweeps, comparisons, benches, every fault on its smallest case.

May use: ``models``, ``layout``, ``forecast``, ``cache``, ``coverage``, ``measure``.
"""
