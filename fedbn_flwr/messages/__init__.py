"""The messages between server and clients.

In reading order:

- ``protocol``: every name in a message, and its configs and answers as values.
- ``site_names``: the rules for names of sites, which nodes report.
- ``records``: state dicts to Flower's ArrayRecords and back, to the bit, and the bytes
  of a round's messages.
- ``moment_record``: the moments of BatchNorm layers as entries of a message.
- ``packing``: all arrays of a message packed into one array, over a network.
- ``numpy_client``: a message as the arguments of a NumPyClient, and its reply.
- ``versions``: packages that a node and its server compare.
"""
