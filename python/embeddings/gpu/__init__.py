"""Embedding tables on GPUs. Nothing in this file is imported with it: Triton is loaded where a tensor is on a GPU."""
