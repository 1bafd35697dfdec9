"""Batch scoring: candidates, features of pairs, the model's answer, the best of each user."""
