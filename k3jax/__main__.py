"""`python -m k3jax`: the command line."""

import sys

from k3jax.cli import main

sys.exit(main())
