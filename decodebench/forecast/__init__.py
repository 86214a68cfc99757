"""What hardware and traffic one does not have would do: bound, simulate, recommend.

May use ``models`` and ``layout``. Loads neither torch nor numpy nor pandas before a function is called.
"""
