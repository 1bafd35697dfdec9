"""A model repository of Triton Inference Server."""
