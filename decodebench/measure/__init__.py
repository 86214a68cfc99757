"""What one decode step costs here, next to what the memory and the processor allow.

A step, per layer: store the new token's keys and values at its slot (or advance the state) and
attend over the block table. Attention and state work only: weights, projections, norms and
sampling are not in it, and neither are building block tables and filling (``prepare_step`` is
outside the clock). Semantics: ``kernels/reference.py``; speed: the other backends.

Under decode context parallelism a step is that of the rank that holds the new token: it reads
``ceil(n / dcp)`` tokens of a sharded layer. May use: ``models``, ``layout``, ``cache``.
"""
