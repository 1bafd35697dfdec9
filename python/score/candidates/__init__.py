"""Which items a user may be shown, before any is ranked: several sources, united and filtered."""
