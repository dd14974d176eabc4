"""Common parts of all rooms: private names of TensorFlow, a step, scoped settings, settings from outside, replaced attributes."""
