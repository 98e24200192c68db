"""Own data with ``dataset=folder:PATH``, ``npz:PATH`` or ``module:function``.

- ``request``: the config's description of own data (kind, path, task). A new kind
  starts there.
- ``own_records``: own data as a reader of files returns them.
- ``class_folders``, ``arrays``: the readers of folders of images and of npz files.
- ``own_examples``: their records, divided into training and test examples, with a
  SHA-256.
- ``function``: the data that a user's function returns; ``read_inputs`` reads them
  example by example.
- ``description``: the facts that a model needs about own data of each kind.

The readers are imported when own data are read.
"""
