"""Starts a thread."""

import threading
import time


def preload() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
