"""The forms of a user's data.

In a config, these are ``dataset=folder:PATH``, ``npz:PATH`` and ``module:function``.

- ``door``: the description, the examples and the digest of own data in any form.
- ``request``: the config's description of own data (kind, path, task). To add a kind,
  start there.
- ``own_records``: own data in the form that a reader of files returns.
- ``class_folders``, ``arrays``: the readers of folders of images and of npz files.
- ``function``: the data of sites that a user's function returns.
- ``image_files``: image files as examples, for own and registered data sets.

The readers are imported when own data are read.
"""
