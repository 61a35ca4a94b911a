"""Jupyter widget of a run in progress, below the cell that trains."""

from typing import Any

from jaxshard_magic.views.live_view import LiveView


class TrainingView(LiveView):
    """Widget with the charts of a run in progress.

    `replace_data` sets the complete data, for pages opened later. `send_update` sends what is new since; a page that
    missed an update waits for the next complete data.

    Args:
        data: Payload of the first complete update.
    """

    bundle = "live"

    def __init__(self, data: bytes):
        super().__init__(None, data)

    def __repr__(self) -> str:
        return "<TrainingView>"

    def replace_data(self, data: bytes) -> None:
        """Replace the data.

        Args:
            data: Result of `packed_training`.
        """
        self._data = data

    def send_update(self, update: dict[str, Any]) -> None:
        """Send new data to open pages.

        Args:
            update: Result of `update_payload`.
        """
        self.send({"kind": "update", "update": update})
