"""Events of runs as OpenLineage has them (https://openlineage.io/docs/spec), by its own client."""
