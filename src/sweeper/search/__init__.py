"""The search: which point to boot next. The only package that knows Optuna."""
