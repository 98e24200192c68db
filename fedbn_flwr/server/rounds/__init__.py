"""A round: messages out, replies in, the next model.

``round`` is a round on one page. ``training`` and ``testing`` are its two halves,
``dispatch`` and ``replies`` what leaves and what returns, ``reestimation`` the pass
that measures statistics, ``synchronised_*`` and ``step_by_messages`` FedTAN's first
step.
"""
