"""Spark: sessions, tasks, exchanges of Arrow data, and what its errors say."""
