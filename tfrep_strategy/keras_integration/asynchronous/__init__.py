"""The driver for workers that run steps independently, and its parts."""
