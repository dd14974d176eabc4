"""What serves nobody who trains: the demo and its data, checks of an installation, the shape of `tf.estimator`."""
