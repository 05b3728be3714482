"""Reading what a user wrote: schemas, readers of single values, YAML files."""
