"""The rounds of a run: its ranks are started, and started again after one was lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.processes.nodes import Nodes
from tfrep_strategy.processes.ranks import Events, Failure
from tfrep_strategy.processes.shared_folder import SharedFolder
from tfrep_strategy.progress import Progress, Step
from tfrep_strategy.running.failures import signal_name


@dataclass
class Round:
    """One start of all ranks of this machine.

    Attributes:
        number: How many rounds there were before.
        events: What ends the round early: signals to this process.
        nodes: The launchers of the round, if there are several. They have met.
        failure: How it failed. Whoever runs the ranks sets it.
        story: The same, for the user.
        keeps_backups: Whether the run may go on although the ranks of this machine have ended well.
    """

    number: int
    events: Events
    nodes: Nodes | None = None
    failure: Failure | None = None
    story: str = ""
    keeps_backups: bool = False

    @property
    def first_rank(self) -> int:
        """The first rank of this machine."""
        return self.nodes.first_rank if self.nodes else 0


class Losses:
    """Where a run was lost, to see whether another start makes sense.

    Example:
        >>> losses = Losses()
        >>> losses.are_again_at(Step(0, 2, 7)), losses.are_again_at(Step(0, 2, 7))
        (False, True)
    """

    def __init__(self) -> None:
        self._last: Step | None = None

    def are_again_at(self, step: Step | None) -> bool:
        """Notes that a rank was lost. Returns whether the loss before was at the same step.

        Args:
            step: Where it was lost; None if no step had begun.
        """
        before, self._last = self._last, step
        return step is not None and step == before

    def forbid_another_start(self, step: Step | None) -> bool:
        """Notes that a rank was lost. Returns whether another start would end at the same step again, and says so.

        Args:
            step: Where it was lost; None if no step had begun.
        """
        is_vain = self.are_again_at(step)
        if is_vain:
            print(f"tfrep: {twice_at(step)}", file=sys.stderr)
        return is_vain


def rounds_here(events: Events, max_restarts: int, backup_dir: SharedFolder | None) -> Iterator[Round]:
    """Yields the rounds of a run on this machine: one more for each that lost a rank, as long as it may be restarted.

    Args:
        events: From `deferred_signals`.
        max_restarts: How many rounds there may be after the first.
        backup_dir: The folder of the run's backups.

    Yields:
        A round. Its `failure` must be set before the next is asked for.

    Example:
        >>> [each.number for each in rounds_here(Events(), 3, None)]
        [0]
    """
    losses = Losses()
    for number in range(max_restarts + 1):
        progress = steps_noted(backup_dir)
        this = Round(number, events)
        yield this
        failure = this.failure
        if failure is None or not failure.was_lost or number == max_restarts:
            return
        step = progress.read() if progress else None
        if losses.forbid_another_start(step):
            return
        print(
            f"tfrep: {how_lost(failure)}. All ranks are started again ({number + 1} of {max_restarts})."
            f" {where_it_goes_on(backup_dir)}",
            file=sys.stderr,
        )


def no_backup_dir(max_restarts: int, **received: object) -> ConfigurationError:
    """Returns the error of a run on several machines that is to be started again, and has no folder for that."""
    what = "A run on several machines is started again from backups, in a folder that all of them reach."
    return ConfigurationError(message(what, hint="name it: --backup-dir.", backup_dir=None, max_restarts=max_restarts, **received))


def how_lost(failure: Failure) -> str:
    """Tells how a rank was lost.

    Example:
        >>> how_lost(Failure(1, 137))
        'rank 1 was lost (SIGKILL)'
    """
    return f"rank {failure.rank} {failure.frozen or f'was lost ({signal_name(failure.exit_code - 128)})'}"


def twice_at(step: Step | None) -> str:
    """Tells why a run is not started again.

    Example:
        >>> twice_at(Step(0, 2, 7))
        'The run was lost twice at the same step: fit 0, epoch 2, batch 7. It is not started again.'
    """
    place = f": fit {step.fit}, epoch {step.epoch}, batch {step.batch}" if step else ""
    return f"The run was lost twice at the same step{place}. It is not started again."


def steps_noted(backup_dir: SharedFolder | None) -> Progress | None:
    """Returns where rank 0 will note its steps; what it noted in an earlier round is removed."""
    if backup_dir is None:
        return None
    progress = backup_dir.progress
    progress.clear()
    return progress


def where_it_goes_on(backup_dir: SharedFolder | None) -> str:
    """Tells where the next round begins.

    Example:
        >>> where_it_goes_on(None)[:24]
        'No fit has a backup yet,'
    """
    if backup_dir is not None and backup_dir.has_backups():
        return "Each fit goes on from its last backup."
    what = "No fit has a backup yet, so that the script begins anew, but for what it saves and restores itself."
    return f"{what}\nHint: call fit, or save in your own loop with tf.train.CheckpointManager, and begin with what it has saved."
