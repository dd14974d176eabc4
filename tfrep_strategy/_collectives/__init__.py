"""What stands behind `collectives.py`."""
