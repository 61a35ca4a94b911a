"""The state of a training on disk: saved while it goes on, and read back under any plan; and files of weights that
others made. The only room that knows Orbax, which is imported when a checkpoint is opened."""

from .saved import Saved as Saved
from .saved import SavedLeaf as SavedLeaf
from .store import Store as Store
