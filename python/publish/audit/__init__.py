"""What the staged scores of a day must pass before they are published.

`integrity` always holds; `distribution` and `rules` are asked for by the section `publish.audit`.
"""
