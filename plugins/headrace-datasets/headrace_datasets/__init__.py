"""Benchmark sets as their authors publish them, as formats of landing files."""
