"""The driver for replicas that train in step, and its parts."""
