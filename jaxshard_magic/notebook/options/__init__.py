"""The command lines of the magics: their options as tables, parsed, and their help text."""

from .flags import COMMANDS as COMMANDS
from .flags import STRATEGIES as STRATEGIES
from .flags import CodeOptions as CodeOptions
from .flags import ExploreOptions as ExploreOptions
from .flags import HistoryOptions as HistoryOptions
from .flags import LineOptions as LineOptions
from .flags import LoadOptions as LoadOptions
from .flags import Options as Options
from .flags import ProfileOptions as ProfileOptions
from .flags import SaveOptions as SaveOptions
from .flags import ScheduleOptions as ScheduleOptions
from .flags import flags_text as flags_text
from .kinds import chooses as chooses
from .kinds import compares as compares
from .kinds import compiled_only as compiled_only
from .kinds import keeps_apart as keeps_apart
from .kinds import only as only
from .kinds import with_strategies as with_strategies
from .kinds import with_strategy as with_strategy
from .line import line_text as line_text
from .line import parse as parse
from .line import parse_command as parse_command
from .text import HELP as HELP
