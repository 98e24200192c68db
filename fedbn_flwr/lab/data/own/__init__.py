"""Own data with ``dataset=folder:PATH``, ``npz:PATH`` or ``module:function``.

- ``request``: the config's description of own data (kind, path, task). To add a kind,
  start there.
- ``own_records``: own data in the form that a reader of files returns.
- ``class_folders``, ``arrays``: the readers of folders of images and of npz files.
- ``own_examples``: the records of a reader, divided into training and test examples,
  with a SHA-256.
- ``function``: the data that a user's function returns; ``read_inputs`` reads them
  example by example.
- ``description``: the facts that a model needs about own data of each kind.

The readers are imported when own data are read.
"""
