"""Traces of what the processes of a run do: some steps of a `fit`, or some seconds of a run that is running."""
