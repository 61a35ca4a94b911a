"""A zoo of ordinary train steps: what the Flax, Equinox, Optax and JAX tutorials have people write.

for step in zoo.STEPS.values():
    call = step.make()
    numbers = zoo.numbers(call, call.run())
"""

from . import adapted_models as adapted_models
from . import adversarial_networks as adversarial_networks
from . import agents as agents
from . import attention_models as attention_models
from . import autoencoders as autoencoders
from . import calling_steps as calling_steps
from . import convolution_steps as convolution_steps
from . import coupled_steps as coupled_steps
from . import denoisers as denoisers
from . import dropless_experts as dropless_experts
from . import equinox_steps as equinox_steps
from . import generative_steps as generative_steps
from . import graphs as graphs
from . import inner_gradients as inner_gradients
from . import language_models as language_models
from . import linen_steps as linen_steps
from . import losses_and_batches as losses_and_batches
from . import meta_and_control_steps as meta_and_control_steps
from . import mixtures as mixtures
from . import nnx_state_steps as nnx_state_steps
from . import nnx_steps as nnx_steps
from . import nnx_transformers as nnx_transformers
from . import optax_steps as optax_steps
from . import plain_steps as plain_steps
from . import recurrent_modules as recurrent_modules
from . import recurrent_training as recurrent_training
from . import science as science
from . import sequence_and_graph_steps as sequence_and_graph_steps
from . import training_programs as training_programs
from . import transformers as transformers
from . import unusual_leaves as unusual_leaves
from . import vision_and_experts as vision_and_experts
from .registry import STEPS as STEPS
from .registry import Call as Call
from .registry import Library as Library
from .registry import Step as Step
from .registry import leaf_name as leaf_name
from .registry import step as step
from .snapshot import Difference as Difference
from .snapshot import differences as differences
from .snapshot import numbers as numbers
from .snapshot import numbers_of_calls as numbers_of_calls

# Steps in the fast rows of matrices: the tutorials', and of those that public repositories have a quick one of each
# library and state. The others run under the marker `full`.
SOME_PUBLIC = ("linen_deep_q", "nnx_lora", "nested_in_main", "packed_state", "codebook_of_averages")
# Those whose arrays are arguments, or closed over by functions; an object that jax doesn't know may own them instead.
TRACED = [name for name, step in STEPS.items() if "owned" not in step.families]
OFTEN = [name for name, step in STEPS.items() if "public" not in step.families or name in SOME_PUBLIC]
SELDOM = [name for name in STEPS if name not in OFTEN]
