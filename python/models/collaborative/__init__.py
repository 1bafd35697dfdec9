"""Collaborative filtering: models of users, items and who chose what."""
