"""`python -m headrace.cli`: the console script, by module."""

from headrace.cli import main

main()
