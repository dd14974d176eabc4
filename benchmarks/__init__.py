"""What a step and an all-reduce cost, beside plain Keras and the peers, measured in one run."""
