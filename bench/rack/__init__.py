"""Three hosts on one machine, and a day of headrace over them: `make rack`, `python -m bench.rack SCENARIO`."""
