"""Landing files and source tables into the lake: read, judged, checked, loaded day by day."""
