"""The demo and its data, checks of an installation, the shape of `tf.estimator`: a training needs none of them."""
