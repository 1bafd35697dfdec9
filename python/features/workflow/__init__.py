"""Workflows: chains of operators, checked, fitted, saved, drawn."""
