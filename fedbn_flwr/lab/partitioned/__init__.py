"""The data of a run: what every node reads, how it is split over the clients, and the
report on it.
"""
