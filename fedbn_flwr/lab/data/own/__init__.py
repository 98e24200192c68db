"""Own data: ``dataset=folder:PATH``, ``npz:PATH`` or ``module:function``.

- ``request``: what the config says of them: kind, path, task. A new kind starts there.
- ``own_records``: what a reader of files finds.
- ``class_folders``, ``arrays``: the readers of folders of images and of npz files.
- ``own_examples``: their records, divided into training and test examples, with a SHA-256.
- ``function``: the data that a user's function returns; ``read_inputs`` reads them
  example by example.
- ``description``: what a model must know of own data of each kind.

The readers are imported when own data are read.
"""
