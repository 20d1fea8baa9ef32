"""``python -m forge_async.dashboard RUN``"""

import sys

from forge_async.dashboard.serve import main

sys.exit(main())
