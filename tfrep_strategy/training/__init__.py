"""Functions and classes for programs: collectives, TF-Replicator's model, callbacks, evaluation beside training."""
