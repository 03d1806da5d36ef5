"""`python -m manyhands.cli` is `manyhands`."""

import sys

from manyhands.cli import main

sys.exit(main())
