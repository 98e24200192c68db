"""The HTML page of a run or a study, and the words that commands share with it.

- ``page``: the texts of the page. ``report.html`` has the headings and the order,
  ``report.css`` the style, ``macros.html`` what both pages share.
- ``pictures``: the pictures of the page.
- ``words``: sentences and numbers, the same on pages and in commands.
- ``calibration.html`` is the page of ``calibrate``.
"""
