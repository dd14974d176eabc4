"""What the user has chosen for a run by variables of the environment, where no option says it."""

from __future__ import annotations

import os

from tfrep_strategy.transports import wanted_communicator


def chosen_by_user(variable: str) -> str | None:
    """Returns what the user has set a variable to. In a rank of a run, what that run has set is not the user's.

    Args:
        variable: One that also tells the processes of a run about it, such as `TFREP_BACKUP_DIR`.

    Returns:
        The value; None if there is none.

    Raises:
        ConfigurationError: It is `TFREP_COMMUNICATOR`, and this process knows no such transport.

    Example:
        >>> chosen_by_user("TFREP_BACKUP_DIR") is None
        True
    """
    if "TFREP_RESTARTS" in os.environ or "TFREP_NUM_REPLICAS" in os.environ:
        return None
    if variable == "TFREP_COMMUNICATOR":
        return wanted_communicator()
    return os.environ.get(variable) or None
