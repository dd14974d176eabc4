"""The driver of replicas that train in step, and its parts."""
