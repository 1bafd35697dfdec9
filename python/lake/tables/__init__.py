"""Tables of somebody's lake as sources: read where they are, at a version that ingest pins."""
