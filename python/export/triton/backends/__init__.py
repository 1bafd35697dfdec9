"""Models of Triton's Python back end: each file is a `model.py` of a repository."""
