"""What a model's layers keep: ``config.json`` → layers → cache specs. Loads neither torch nor numpy nor pandas.

May use: ``errors`` and ``words``.
"""
