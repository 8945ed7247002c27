"""``python -m dynamo_cyclefix``, the same as the console script ``dynamo-cyclefix``."""

import sys

from dynamo_cyclefix._commands.main import main

if __name__ == "__main__":
    sys.exit(main())
