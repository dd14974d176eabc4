"""Where what TensorFlow does for one process is made right for many: checkpoints, cache files, the end of pipelines."""
