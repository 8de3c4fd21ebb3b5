"""`python -m halfbyte` is `halfbyte`."""

import sys

from halfbyte.cli.main import main

sys.exit(main())
