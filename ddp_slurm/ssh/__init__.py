"""The one way to reach a machine: a command here, or by the system's ssh client."""
