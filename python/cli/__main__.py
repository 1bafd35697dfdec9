"""Entry point of `python -m headrace.cli`, the same as the command `headrace`."""

from headrace.cli import main

main()
