"""The server half that all strategies share: Flower's calls, nodes, messages, replies,
optional parts of a method.
"""
