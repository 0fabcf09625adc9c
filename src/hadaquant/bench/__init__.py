"""How fast is it? Each op beside what one would use without it: checked, then timed in one race.

``cases.py`` says what is measured. ``rows.py``, ``products.py`` and ``model.py`` build the contestants, ``runner.py``
checks and times them, ``record.py`` appends the times to a file, ``results.py`` reads them for tables and plots.
"""

from hadaquant.bench.cases import OPS, SUITES, Case, Op, choose
from hadaquant.bench.record import default_file
from hadaquant.bench.results import Result, latest, read
from hadaquant.bench.runner import Outcome, run

__all__ = ["OPS", "SUITES", "Case", "Op", "Outcome", "Result", "choose", "default_file", "latest", "read", "run"]
