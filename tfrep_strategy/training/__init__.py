"""What programs call: collectives, TF-Replicator's model, callbacks, evaluation beside training."""
