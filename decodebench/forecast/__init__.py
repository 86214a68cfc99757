"""Hardware and traffic that one does not have: what a decode step must cost, and what it is likely to.

Built on ``models`` and ``layout`` alone. Loads neither torch nor numpy nor pandas at import.
"""
