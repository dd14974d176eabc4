"""Traces of the processes of a run: some steps of a `fit`, or some seconds of a running run."""
