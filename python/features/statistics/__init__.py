"""Counts of every column and every feature by day, for the drift that `headrace.monitor` judges."""
