"""``python docs/generate``: see ``doc_tables``."""

from doc_tables import main

raise SystemExit(main())
