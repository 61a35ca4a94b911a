"""Knowledge about JAX primitives: a row for each in `table`, differences between JAX versions in `jaxprs`."""

from .jaxprs import WrappedFun as WrappedFun
from .jaxprs import axis_names as axis_names
from .jaxprs import bind as bind
from .jaxprs import bind_cond as bind_cond
from .jaxprs import bind_with_dtype as bind_with_dtype
from .jaxprs import called_body as called_body
from .jaxprs import function_parts as function_parts
from .jaxprs import has_single_device_effects as has_single_device_effects
from .jaxprs import has_unresolved_checks as has_unresolved_checks
from .jaxprs import has_visible_effects as has_visible_effects
from .jaxprs import hoist_constants as hoist_constants
from .jaxprs import is_float as is_float
from .jaxprs import is_literal as is_literal
from .jaxprs import is_tracing_state as is_tracing_state
from .jaxprs import open_jaxpr as open_jaxpr
from .jaxprs import reduce_mapped_axes as reduce_mapped_axes
from .jaxprs import rename_axes as rename_axes
from .jaxprs import scan_counts as scan_counts
from .jaxprs import shape_of as shape_of
from .jaxprs import with_outputs as with_outputs
from .jaxprs import without_inputs as without_inputs
from .jaxprs import wrapped_like as wrapped_like
