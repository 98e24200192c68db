"""The default app."""
