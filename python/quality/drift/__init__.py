"""Drift: counts of every column by day, and the stage that holds the newest days against the training range."""
