"""Calls no `fit`."""

print("FOUND {}")
