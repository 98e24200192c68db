"""A metric at each site with its interval, its difference to another run there, and what can be decided."""
