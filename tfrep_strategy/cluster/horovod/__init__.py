"""Horovod: its build for the installed TensorFlow, and the server at which its ranks meet."""
