"""What is asked of a job: the keys of job.yaml, which are also the options of ``submit`` and ``plan``."""
