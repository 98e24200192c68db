"""A round: messages out, replies in, the next model. What lasts longer is the run's.

In the order in which to read them:

- ``round``: a round on one page.
- ``training``: its first half: sample, address, read, release, average.
- ``dispatch``: the messages that leave, and whose replies came back.
- ``replies``: what a reply must hold; how it is read, checked and refused.
- ``testing``: its second half, and the model that is tested.
- ``reestimation``: BN statistics from a pass over the clients' data, before a test.
- ``synchronised_training``: a training whose first local step is synchronised.

Not here: which nodes there are, and reports (``server.runs``); what a method makes of
the replies (``server.methods``); how the exchanges of a synchronised step travel
(``transport``); the loop over the rounds (``server.strategy``).
"""
