"""What the two examples share: options, models, data. Not part of the library."""
