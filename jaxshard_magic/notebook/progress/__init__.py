"""Progress line: the reason of a long wait, and the progress of a training loop.

The module `training` is imported when a cell runs, as it imports the words of the views.
"""

from .frontend import Draw as Draw
from .frontend import line_for as line_for
from .line import Progress as Progress
