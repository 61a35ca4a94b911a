"""How what devices reduce and exchange along named axes follows the batch, where each has as many examples in every
microbatch."""

from .example_site import Lost, Site
from .examples import Label, Places, Rows


def _linear(site: Site) -> list[Label]:
    """Row by row: the devices' rows of a microbatch meet as they do in the whole batch."""
    if any(isinstance(x, Places) for x in site.labels):
        raise Lost
    return list(site.labels)


def _extreme(site: Site) -> list[Label]:
    return [site.exact(i) for i in range(len(site.labels))]


def _gathered(site: Site) -> list[Label]:
    return _along(site, "all_gather_dimension", 1)


def _scattered(site: Site) -> list[Label]:
    return _along(site, "scatter_dimension", -1)


def _along(site: Site, named: str, more: int) -> list[Label]:
    """Linear; `more` dimensions where the devices get one of their own, else they share the one that is named."""
    at, tiled = site.params[named], site.params["tiled"]
    return [_beside(label, at, 0 if tiled else more) for label in _linear(site)]


def _beside(label: Label, at: int, more: int) -> Label:
    if not isinstance(label, Rows):
        return label
    if label.dim == at and more < 1:  # the devices' rows one after the other, or a part of them
        raise Lost
    return Rows(label.dim + more * (label.dim >= at), label.scale)


def _exchanged(site: Site) -> list[Label]:
    p, label = site.params, _linear(site)[0]
    if isinstance(label, Rows) and (not p["tiled"] or label.dim in (p["split_axis"], p["concat_axis"])):
        raise Lost
    return [label]


COLLECTIVES = {
    **dict.fromkeys(("psum", "psum_invariant", "ppermute"), _linear),
    **dict.fromkeys(("pmax", "pmin"), _extreme),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _gathered),
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
}
