"""Shares that follow the ranks' speeds while they train."""
