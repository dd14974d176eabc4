"""Files of models and backups, and the state of callbacks and optimizers that is saved beside them."""
