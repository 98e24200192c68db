"""What a writer of a method needs: its interface, what travels, its settings.

``method`` is the interface of a paper's algorithm, ``travels`` the declaration of what
is sent, kept and frozen, ``params`` and ``method_params`` are the settings, ``options``
what every method can have beside its own, ``together`` the methods of one run.
"""
