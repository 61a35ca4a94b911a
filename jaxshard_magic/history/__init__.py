"""The history: every Report, kept in one database across kernels and notebooks."""

from .calibration import Calibration as Calibration
from .calibration import calibration as calibration
from .database import Unkept as Unkept
from .listed import SHOWN as SHOWN
from .listed import History as History
from .row import Row as Row
from .store import Store as Store
