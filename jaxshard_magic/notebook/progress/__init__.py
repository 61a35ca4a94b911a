"""The line that says what a long wait is for, and how far a training loop has come.

What it says of a loop, `training`, is imported when a cell runs: it brings the words of the views.
"""

from .frontend import Draw as Draw
from .frontend import line_for as line_for
from .line import Progress as Progress
