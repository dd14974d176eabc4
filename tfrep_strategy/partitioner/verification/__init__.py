"""Compares the tensors of a partitioned step with those of one device, while a program runs."""
