"""The same answers for hardware and traffic that one does not have.

Loads neither torch nor numpy nor pandas at import. May use: ``models``, ``layout``.
"""
