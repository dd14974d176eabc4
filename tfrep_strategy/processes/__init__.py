"""Processes that this package starts: who each of them is, how they start and end, and what one that fails leaves behind."""
