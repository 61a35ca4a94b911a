"""The line that says what a long wait is for, and how far a training loop has come.

What it says of a loop, `training`, is imported when a cell runs: it brings the words of the views.
"""

from jaxshard_magic._progress.frontend import line_for as line_for
from jaxshard_magic._progress.line import Progress as Progress
