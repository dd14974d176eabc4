"""What all rooms need: private names of TensorFlow, a step, settings of a block of code and from outside, replaced attributes."""
