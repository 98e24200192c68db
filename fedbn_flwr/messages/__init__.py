"""The messages between server and clients: names, records, and their forms for
NumPyClients.
"""
