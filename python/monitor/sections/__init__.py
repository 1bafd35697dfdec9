"""The sections of the report, each from the facts that are there; a section about a stage that did not run says so."""
