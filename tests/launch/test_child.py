"""The names that a run's strategy takes over keep their meaning otherwise."""

from __future__ import annotations

import tensorflow as tf

from tfrep_strategy.launch.child import StandIn


def test_stand_in():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    stand_in = StandIn(tf.distribute.OneDeviceStrategy, "the run's")
    assert stand_in(["GPU:0"], communication_options=None) == "the run's"
    assert isinstance(strategy, stand_in)
    assert not isinstance("the run's", stand_in)
    assert issubclass(tf.distribute.OneDeviceStrategy, stand_in)
    assert not issubclass(str, stand_in)
    assert stand_in.scope is tf.distribute.OneDeviceStrategy.scope

    class Own(stand_in): ...

    assert Own.__mro__[1] is tf.distribute.OneDeviceStrategy
