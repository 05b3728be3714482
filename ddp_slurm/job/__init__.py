"""The options of a job: their values, the rules between them, job.yaml, the log's path."""
