"""How an engine lays the layers out: specs → groups → pages → block tables; what fits, what a step reads.

Loads neither torch nor numpy nor pandas. May use: ``models``.
"""
