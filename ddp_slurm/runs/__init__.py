"""Submitted jobs: their folder, their log, their state, and the commands status, logs and cancel."""
