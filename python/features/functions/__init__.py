"""Column functions that give the same bits in Spark, Arrow and NumPy, and helpers for either engine's columns."""
