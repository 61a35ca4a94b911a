"""Everything that is asked of a step, as one frozen `Request`: parsed and checked once, handed on whole."""

from .from_line import changed_by as changed_by
from .from_line import is_line as is_line
from .gradient_options import REDUCE as REDUCE
from .gradient_options import GradientOptions as GradientOptions
from .pipeline_options import PipelineOptions as PipelineOptions
from .request import Request as Request
from .request import automatic as automatic
from .request import make_request as make_request
from .request import step_options as step_options
from .strategy_text import AUTO as AUTO
from .strategy_text import Part as Part
from .strategy_text import jobs_of as jobs_of
from .strategy_text import parse_strategy as parse_strategy
from .strategy_text import part_axes as part_axes
