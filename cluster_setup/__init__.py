"""The guide, and the shell scripts that the installer and the probe send to nodes."""
