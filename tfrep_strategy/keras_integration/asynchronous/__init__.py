"""The driver of workers that take steps on their own, and its parts."""
