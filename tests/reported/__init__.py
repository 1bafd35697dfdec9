"""Inputs that users of other tools reported as lost, changed or refused without a word: one file a report.

Each file makes its own small data, runs stages of headrace over them and compares with values computed independently.
`pytest tests/reported` runs them all.
"""
