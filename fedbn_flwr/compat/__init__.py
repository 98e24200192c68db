"""Where this package touches what Flower does not promise: its internals, and its legacy loop."""
