"""What is known of jax's primitives: a row each in `table`, what differs between versions of jax in `jaxprs`."""

from .jaxprs import WrappedFun as WrappedFun
from .jaxprs import axis_names as axis_names
from .jaxprs import bind as bind
from .jaxprs import bind_as as bind_as
from .jaxprs import called as called
from .jaxprs import conditional as conditional
from .jaxprs import has_checks as has_checks
from .jaxprs import hoisted as hoisted
from .jaxprs import is_float as is_float
from .jaxprs import is_literal as is_literal
from .jaxprs import made_of as made_of
from .jaxprs import noted_by_jax as noted_by_jax
from .jaxprs import opened as opened
from .jaxprs import over_axes as over_axes
from .jaxprs import runs_on_one_device as runs_on_one_device
from .jaxprs import scan_counts as scan_counts
from .jaxprs import shape_of as shape_of
from .jaxprs import shows as shows
from .jaxprs import with_outputs as with_outputs
from .jaxprs import without_inputs as without_inputs
from .jaxprs import without_mapped_axes as without_mapped_axes
