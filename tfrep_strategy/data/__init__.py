"""Data of replicas: each process reads its part of one pipeline, or its own pipelines."""
