"""Metrics of a pipeline as a text file of Prometheus."""
