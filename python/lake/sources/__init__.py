"""Readers of landing files, one for each format.

To add one: a `reader.LandingReader` in a module here, and its `FileFormat` with a line of `FILE_FORMATS` in
`headrace.config.formats`. A format of another package needs neither: docs/plugins.md.
"""
