"""What the Spark and Arrow bodies of operators share: columns by value, keys, lookups, column functions."""
