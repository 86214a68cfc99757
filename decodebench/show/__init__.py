"""Tables as words, figures and pages: notebooks, reports, the explorer.

May use: ``models``, ``layout``, ``forecast``, ``cache``, ``coverage``, ``measure``.
"""
