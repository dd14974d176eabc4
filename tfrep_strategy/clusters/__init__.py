"""A cluster of workers and parameter servers on this machine."""
