"""Where an attempt goes: to disk first, whole or not at all, and then to MLflow."""
