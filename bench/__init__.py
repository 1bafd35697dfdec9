"""Benchmarks: `make bench-NAME` runs bench/bench_NAME.py, writes build/bench/NAME.json and prints it as a table."""
