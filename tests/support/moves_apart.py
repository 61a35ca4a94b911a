"""Steps of the zoo of which Shardy's passes find other moves than planned, with the reason and what XLA sends."""

ALL = ("dp", "fsdp", "fsdp+tp")
DATA, MODEL = ("dp", "fsdp"), ("fsdp+tp",)

SUMS = "Shardy adds up a batch's statistics, or moves a small convolution, otherwise than XLA, which does as planned"
WIDE = "XLA for the CPU sends bfloat16 in float32, as planned"
ROWS = "XLA moves rows of graphs, or tokens on their way to experts, in other ways than planned"
GATES = "XLA gathers the weights of a recurrent cell once, not in each trip, and moves its gates, which no plan tells"
SEARCH = "XLA gathers what a line search compares, which no plan tells"
SMALL = "XLA gathers, or adds up, small results that no plan tells, of 8 KiB at most"
MERGED = "XLA gathers divided features that are merged, grouped or ravelled, which no plan tells"
OLDER = "XLA of jax 0.10 gathers small results that no plan tells, and that of 0.12 none"
SOLVES = "XLA gathers rows for linear algebra, which no plan tells"

_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("linen_dcgan", DATA, SUMS),
    ("linen_batch_statistics", DATA, SUMS),
    ("nnx_cnn_returns_nothing", ALL, SUMS),
    ("nnx_bias_before_norm", ALL, SUMS),
    ("equinox_dcgan", ("fsdp",), SUMS),
    ("equinox_cnn", ("fsdp",), SUMS),
    ("mlp_mixer", MODEL, SUMS),
    ("mixed_precision", ALL, WIDE),
    ("graph_network", ALL, ROWS),
    ("padded_graphs", ALL, ROWS),
    ("linen_one_graph", MODEL, OLDER),
    ("dispatched_together", ALL, ROWS),
    ("dropless_placed", ALL, ROWS),
    ("linen_lstm", MODEL, GATES),
    ("lstm_characters", MODEL, GATES),
    ("lbfgs_whole_fit", MODEL, SEARCH),
    ("lbfgs_line_search", ("fsdp", "fsdp+tp"), SEARCH),
    ("linen_deep_q", ALL, SMALL),
    ("linen_dcgan", MODEL, SMALL),
    ("linen_batch_statistics", MODEL, SMALL),
    ("linen_twin_critics", MODEL, SMALL),
    ("linen_ppo_epochs", MODEL, SMALL),
    ("linen_padded_tokens", MODEL, OLDER),
    ("codebook_of_averages", MODEL, SMALL),
    ("variational_inference", MODEL, SMALL),
    ("equinox_score_matching", MODEL, SMALL),
    ("diffusion", MODEL, SMALL),
    ("batch_drawn_inside", MODEL, SMALL),
    ("molecular_forces", MODEL, SMALL),
    ("low_rank_factors", ("fsdp", "fsdp+tp"), SMALL),
    ("residual_network", MODEL, MERGED),
    ("linen_ddpm", MODEL, MERGED),
    ("complex_and_integer_leaves", MODEL, MERGED),
    ("gaussian_process", DATA, SOLVES),
)
APART = {(name, strategy): reason for name, strategies, reason in _ROWS for strategy in strategies}

# No plan: what can't be divided so, or not traced with arrays of shapes alone.
REFUSED = {
    **{(name, "fsdp+tp"): "no matmul" for name in ("matrix_factors", "meta_of_sinusoids", "gaussian_process")},
    **{("trainer_owns_its_modules", strategy): "can't be compiled" for strategy in ALL},
}
