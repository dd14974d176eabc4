"""Files of models and of backups, and what callbacks and optimizers remember beside them."""
