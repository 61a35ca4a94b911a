"""A training as a Jupyter widget under the cell that trains: it is told what is new as it goes."""

from typing import Any

from jaxshard_magic.views.live_view import LiveView


class TrainingView(LiveView):
    """Charts of a training that runs. `keep` gives it all there is, for a page that is opened again; `tell` what is new
    since, which a page that missed something leaves until the next `keep`."""

    bundle = "live"

    def __init__(self, data: bytes):
        super().__init__(None, data)

    def __repr__(self) -> str:
        return "<TrainingView>"

    def keep(self, data: bytes) -> None:
        """Have it draw all of `data`, what `packed_training` wrote."""
        self._data = data

    def tell(self, update: dict[str, Any]) -> None:
        """Have it draw what is new."""
        self.send({"kind": "update", "update": update})
