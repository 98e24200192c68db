"""The steps of a round, from sending messages to computing the next model.

Read the modules in this order:

- ``round``: a round on one page, and its steps.
- ``dispatch``: the messages that are sent, and the senders of the replies.
- ``replies``: reading and refusing a reply. ``batchnorm.averaging`` decides whether
  its arrays fit and are finite.
- ``recalibration``: BN statistics from a pass over the clients' data, before a test.
- ``synchronised_training``: a training whose first local step is synchronised.

Other packages contain the nodes, the reports and everything else that lasts longer than
a round (``server.runs``), the methods that use the replies (``server.methods``), the
transport of a synchronised step (``transport``), and the loop over the rounds
(``server.strategy``).
"""
