"""What lasts longer than a round: the run's state and all that it knows.

``run`` is the state, ``nodes`` knows the clients, ``kept`` what they keep, ``report``
what a round tells, ``failures`` how rounds and runs fail, ``protection`` what hides
single clients.
"""
