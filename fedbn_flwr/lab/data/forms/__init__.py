"""The forms of a user's data.

In a config, these are ``dataset=folder:PATH`` and ``module:function``.

- ``door``: the description, the examples and the digest of own data in any form.
- ``request``: the config's description of own data (kind, path, task). To add a kind,
  start there.
- ``folder``: the images of a user's folders.
- ``function``: the data of sites that a user's function returns.
- ``image_files``: image files as examples, for own and registered data sets.

The reader is imported when own data are read.
"""
