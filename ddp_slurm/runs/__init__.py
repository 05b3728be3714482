"""Submitted jobs: folder, log and state, and the commands status, logs and cancel."""
