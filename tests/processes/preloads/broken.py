"""Cannot be imported to the end."""


def preload() -> None:
    raise ImportError("no such library")
