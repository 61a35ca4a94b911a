"""What must stand in the environment before jax starts: eight simulated devices, quick compiles, a cache of its own."""

import os
import tempfile
from importlib.metadata import version
from pathlib import Path

CACHE = Path(tempfile.gettempdir()) / f"jaxshard-magic-tests-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
# Most of the tests' time is LLVM optimising programs that run once; XLA's fusion emitters, which jaxlib 0.10 can do
# without, take two thirds of what is left of a compile. Neither changes what is compiled.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # 0.12 ends the process at a flag that it doesn't know any more
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
SETTINGS = {
    # With fewer threads programs on different simulated devices starve each other, and XLA aborts.
    "NPROC": "32",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "XDG_CACHE_HOME": str(CACHE / "home"),  # what compilers of hardware that isn't attached said
    "JAXSHARD_HISTORY": str(CACHE / f"history-{os.getpid()}.sqlite3"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "XLA_FLAGS": " ".join(FLAGS),
    # Else a program comes back with the source lines of another one that computes the same.
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
}
