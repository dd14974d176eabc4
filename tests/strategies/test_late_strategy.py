"""A strategy that is made after TensorFlow has run something, as in a notebook whose first cells prepare the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from late_program import prepared, trained
from test_peer_failure import EACH, SURVIVORS_END_WITHIN, run_ranks

pytestmark = pytest.mark.lane("faults")

PROGRAM = Path(__file__).with_name("late_program.py")


@EACH
def test_a_late_strategy_gives_the_answer_of_one_device(communicator: str, tmp_path: Path) -> None:
    outcome = run_ranks(communicator, 2, "train", 0, tmp_path, PROGRAM)
    assert outcome.codes == [0, 0], outcome.output[0][-3000:]
    expected = trained(prepared(), [])
    for rank in range(2):
        with np.load(tmp_path / f"weights{rank}.npz") as found:
            for name, weights in zip(found.files, expected, strict=True):
                np.testing.assert_allclose(found[name], weights, rtol=1e-5, atol=1e-5)
    warned = "variables, models, iterators and functions cannot.\nHint: make the strategy before them." in outcome.output[0]
    assert warned is (communicator in ("tf", "auto"))


def test_ranks_of_a_late_strategy_name_the_one_that_ends(tmp_path: Path) -> None:
    outcome = run_ranks("tf", 2, "kill", 1, tmp_path, PROGRAM)
    assert outcome.codes == [1, -9]
    assert outcome.seconds < SURVIVORS_END_WITHIN
    assert "Rank 1 ended" in outcome.output[0]
