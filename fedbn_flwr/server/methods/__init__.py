"""Everything that the author of a method needs. No message is sent here.

Read the modules in this order:

- ``method``: the interface of a paper's algorithm, a client as a method sees it, and
  the facts of a round.
- ``phases``: the declaration of the sent, local and frozen parts in each phase.
- ``params``: the settings of all methods.
- ``options``: options that every method can have; ``momentum`` and ``shared_bn`` are
  two of them.
- ``together``: the methods of one run, used as one method; and the refusals that follow
  from their declarations: a model without the layers or the common entries that they
  need, settings without effect, tests without a model, and late phases.
- ``combination``: the methods of a strategy's class, with their settings as the
  arguments of the strategy.

Other packages contain the papers' algorithms (``strategies``), the round that calls a
method (``server.rounds``), the strategy for Flower (``server.strategy``), and the hooks
of the client (``training.client_hook``).
"""
