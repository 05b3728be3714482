"""What the two examples share: command-line arguments, models, CIFAR-10. Not part of the library."""
