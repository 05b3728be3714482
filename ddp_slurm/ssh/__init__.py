"""The one way to reach another machine."""
