"""History of Reports in one database, shared by kernels and notebooks."""

from .calibration import Calibration as Calibration
from .calibration import calibration as calibration
from .database import HistoryError as HistoryError
from .row import Row as Row
from .store import SHOWN as SHOWN
from .store import History as History
from .store import Store as Store
