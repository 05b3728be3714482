"""Ways to start a rendered job. The only place on the submitting side that runs a command."""
