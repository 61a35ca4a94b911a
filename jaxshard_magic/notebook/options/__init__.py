"""Command lines of the magics: tables of options, the parser, and help texts."""

from ...config.flags import LineOptions as LineOptions
from .help_text import HELP as HELP
from .line_checks import check_kind as check_kind
from .line_checks import check_only as check_only
from .line_checks import check_output as check_output
from .line_checks import compiled_only as compiled_only
from .line_checks import is_comparison as is_comparison
from .line_checks import is_search as is_search
from .line_checks import with_strategies as with_strategies
from .line_checks import with_strategy as with_strategy
from .line_options import COMMANDS as COMMANDS
from .line_options import CodeOptions as CodeOptions
from .line_options import ExploreOptions as ExploreOptions
from .line_options import HistoryOptions as HistoryOptions
from .line_options import LoadOptions as LoadOptions
from .line_options import ProfileOptions as ProfileOptions
from .line_options import SaveOptions as SaveOptions
from .line_options import ScheduleOptions as ScheduleOptions
from .line_options import ShardOptions as ShardOptions
from .line_options import flags_text as flags_text
from .parser import line_text as line_text
from .parser import parse as parse
from .parser import parse_command as parse_command
