"""Formats of landing files. To add one: a module here whose function reads a `LandingBatch` into frames
(headrace.lake.sources.frame says which columns they have), a line in `formats.FORMATS`, and the name in
`headrace.config.source.LandingFormat`.
"""
