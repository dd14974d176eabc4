"""Trains to global step 8; rank 1 is killed at step 5 the first time. The chief prints the steps that it does, and its results."""

import os
import signal
import sys

import tfrep_strategy as tfrep

sys.path.insert(0, sys.argv[1])
from estimator_programs import make_model, shuffled_input_fn  # noqa: E402


class Dies(tfrep.estimator.SessionRunHook):
    def after_run(self, run_context, run_values):
        step = run_context.session.global_step
        print("step", step, flush=True)
        if step == 5 and not tfrep.is_chief() and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


config = tfrep.estimator.RunConfig("model", save_checkpoints_steps=2)
estimator = tfrep.estimator.model_to_estimator(make_model(), config=config)
estimator.train(shuffled_input_fn, hooks=[Dies()], max_steps=8)
