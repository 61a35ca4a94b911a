"""The command lines of the magics: their options as tables, parsed, and their help text."""

from .flags import CODE_FLAGS as CODE_FLAGS
from .flags import COMMANDS as COMMANDS
from .flags import EXPLORE_FLAGS as EXPLORE_FLAGS
from .flags import FLAGS as FLAGS
from .flags import HISTORY_FLAGS as HISTORY_FLAGS
from .flags import SCHEDULE_FLAGS as SCHEDULE_FLAGS
from .flags import STRATEGIES as STRATEGIES
from .flags import Flag as Flag
from .flags import flags_text as flags_text
from .kinds import chooses as chooses
from .kinds import compares as compares
from .kinds import compiled_only as compiled_only
from .kinds import only as only
from .kinds import with_strategies as with_strategies
from .kinds import with_strategy as with_strategy
from .line import CodeOptions as CodeOptions
from .line import ExploreOptions as ExploreOptions
from .line import HistoryOptions as HistoryOptions
from .line import Options as Options
from .line import ScheduleOptions as ScheduleOptions
from .line import parse as parse
from .line import parse_code as parse_code
from .line import parse_explore as parse_explore
from .line import parse_history as parse_history
from .line import parse_schedule as parse_schedule
from .text import HELP as HELP
