"""A zoo of ordinary train steps: what the Flax, Equinox, Optax and JAX tutorials have people write.

for step in zoo.STEPS.values():
    call = step.make()
    numbers = zoo.numbers(call, call.run())
"""

from . import attention_models as attention_models
from . import calling_steps as calling_steps
from . import convolution_steps as convolution_steps
from . import coupled_steps as coupled_steps
from . import equinox_steps as equinox_steps
from . import generative_steps as generative_steps
from . import linen_steps as linen_steps
from . import meta_and_control_steps as meta_and_control_steps
from . import nnx_state_steps as nnx_state_steps
from . import nnx_steps as nnx_steps
from . import nnx_transformers as nnx_transformers
from . import optax_steps as optax_steps
from . import plain_steps as plain_steps
from . import recurrent_modules as recurrent_modules
from . import sequence_and_graph_steps as sequence_and_graph_steps
from . import transformers as transformers
from . import unusual_leaves as unusual_leaves
from . import vision_and_experts as vision_and_experts
from .registry import STEPS as STEPS
from .registry import Call as Call
from .registry import Step as Step
from .registry import step as step
from .snapshot import numbers as numbers
