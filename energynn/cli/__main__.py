"""``python -m energynn.cli``, where no ``energynn`` is on the PATH."""

import sys

from energynn.cli import main

sys.exit(main())
