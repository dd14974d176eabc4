"""A test that fails on rank 1 alone, and one that holds on both."""

import tensorflow as tf
from keras.src import testing


class Alone(testing.TestCase):
    def test_1_fails_on_rank_1(self) -> None:
        strategy = tf.distribute.get_strategy()
        rank = strategy.rank
        assert rank == 0
        strategy.communicator.all_reduce([tf.ones([])])

    def test_2_holds(self) -> None:
        total = tf.distribute.get_strategy().communicator.all_reduce([tf.ones([])])
        assert float(total[0]) == 2.0
