"""Methods: what a writer of a method needs. No message is sent or read here.

In the order in which to read them:

- ``method``: a client as a method sees it, the interface of a paper's algorithm, and
  what it is told of a round.
- ``travels``: the declaration of what is sent, local and frozen in each phase.
- ``params``: the settings of all methods; ``method_params``: those of one each.
- ``options``: what every method can have, too; ``momentum`` and ``shared_bn``
  are two of them.
- ``moments``: clients' moments by layer, for a method that pools statistics.
- ``together``: the methods of one run as one, and what does not fit.
- ``disclosures``: what they take from clients besides the model, for privacy.

Not here: the papers' algorithms (``strategies``); the round that calls a method
(``server.rounds``); its strategy for Flower (``server.strategy``); the client's hooks
(``training.client_hook``).
"""
