"""What every strategy stands on: Flower's calls, nodes, messages and replies, and the parts any method may use."""
