"""The parts that depend on Flower's internals and on its legacy loop, which may change."""
