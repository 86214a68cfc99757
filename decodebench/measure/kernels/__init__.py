"""Decode steps over paged caches: the plain reference, and the backends checked against it."""
