"""Figures of one GPU: `python bench/gpu/run.py`, with torch and Triton alone."""
