"""The pure core: values and decisions. No clock, no I/O, no optuna, no mlflow, no hydra."""
