"""Is not done before a test is."""

import time


def preload() -> None:
    time.sleep(60)
