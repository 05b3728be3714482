"""Reading what a user wrote: schemas, the readers of single values, YAML files with line numbers."""
