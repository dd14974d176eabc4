"""Data of replicas: each process reads its parts of one pipeline, or its own pipelines."""
