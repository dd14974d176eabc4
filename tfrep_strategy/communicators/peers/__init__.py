"""Connections between the ranks beside the collectives, which report ranks that have ended, wait, or call something else."""
