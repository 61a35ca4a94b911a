"""The command lines of the magics: their options as tables, parsed, and their help text."""

from ...config.flags import LineOptions as LineOptions
from .kinds import check_only as check_only
from .kinds import check_output as check_output
from .kinds import compiled_only as compiled_only
from .kinds import is_comparison as is_comparison
from .kinds import is_search as is_search
from .kinds import with_strategies as with_strategies
from .kinds import with_strategy as with_strategy
from .line import line_text as line_text
from .line import parse as parse
from .line import parse_command as parse_command
from .lines import COMMANDS as COMMANDS
from .lines import CodeOptions as CodeOptions
from .lines import ExploreOptions as ExploreOptions
from .lines import HistoryOptions as HistoryOptions
from .lines import LoadOptions as LoadOptions
from .lines import ProfileOptions as ProfileOptions
from .lines import SaveOptions as SaveOptions
from .lines import ScheduleOptions as ScheduleOptions
from .lines import ShardOptions as ShardOptions
from .lines import flags_text as flags_text
from .text import HELP as HELP
