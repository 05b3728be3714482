"""What the two examples share, not part of the library: options, models, data."""
