"""`python -m halfbyte.cli` is `halfbyte`."""

import sys

from halfbyte.cli.main import main

sys.exit(main())
